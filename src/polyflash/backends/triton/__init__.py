"""Triton kernels: NVIDIA and AMD GPUs from one source, and any machine in Triton's interpreter."""
