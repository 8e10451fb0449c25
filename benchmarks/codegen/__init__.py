"""What the compiler makes of the shipped Triton kernels, for GPUs that need not be here."""
