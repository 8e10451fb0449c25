"""polyflash and its peers on one CUDA device, in a time budget."""
