"""The WebGPU engine on the adapter of this machine, by the device's own clock."""
