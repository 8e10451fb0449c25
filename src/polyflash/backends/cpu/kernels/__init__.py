"""CPU kernels, each built for one key: functions that numba compiles from the stages of a tile."""
