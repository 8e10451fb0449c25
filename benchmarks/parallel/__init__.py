"""One sequence over the GPUs of a host: correct first, then how quick beside one GPU."""
