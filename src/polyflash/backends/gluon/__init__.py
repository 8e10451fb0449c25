"""NVIDIA Hopper in Gluon: warps that load, and warpgroups that multiply, each with code of its own."""
