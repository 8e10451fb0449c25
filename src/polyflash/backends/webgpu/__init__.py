"""The WebGPU engine: WGSL kernels through wgpu-py, on any GPU with a Vulkan, Metal or D3D12 driver."""
