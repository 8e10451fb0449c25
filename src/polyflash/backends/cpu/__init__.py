"""The CPU engine: numba outer loops around vector microkernels emitted as LLVM IR."""
