"""The floor below the engines of GPUs: views, numbers and launches, without a kernel language."""
