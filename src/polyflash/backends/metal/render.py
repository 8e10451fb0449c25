"""The text of a library: constants, the structs of a call's numbers, and the kernels of one phase."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from polyflash.backends.metal.uniforms import struct_text

FILES = {
    "attend": ("tiles", "scores", "forward"),
    "merge": ("tiles", "scores", "merge"),
    "center": ("tiles", "scores", "center"),
    "differentiate": ("tiles", "scores", "backward"),
    "differentiate_bias": ("tiles", "scores", "bias_gradient"),
}
TYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}
# Weights of rows that saw a NaN are NaN, and the weight of an only key is 1: no rule of fast math holds here.
_PREAMBLE = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#endif
using namespace metal;
#define UNROLL _Pragma("clang loop unroll(full)")
"""
# Slots 0 to 13 of every kernel; those of tensors that a call lacks hold any tensor, and nothing reads them.
_OPERANDS = (
    *((name, "device const int*") for name in ("kv_lens", "kv_starts", "q_offset")),
    ("mask", "device const char*"),
    ("bias", "device const BIAS*"),
    *((name, "device const float*") for name in ("slopes", "sinks")),
    *((name, "device const int*") for name in ("q_segments", "k_segments", "cu_seqlens_q", "cu_seqlens_k")),
    ("page_table", "device const int*"),
    ("n", "constant Numbers&"),
    ("f", "constant Factors&"),
)


class Constants(NamedTuple):
    """Everything that is compiled in."""

    T: str  # of q, k, v and gradients
    OUT: str  # of what `attend` writes: parts of a split call are floats
    BIAS: str
    DIM: int
    DIM_V: int
    BLOCK_M: int = 8
    BLOCK_N: int = 8
    OWN: int = 8
    WALK: int = 8
    STAGES: int = 1
    SPLIT_EXP: int = 1
    EXACT: bool = False  # float32: sums of a block are made by themselves
    BASE2: bool = True
    SKIP: bool = True
    SPLIT: bool = False
    VECTOR: bool = False  # are 4 channels of K and V one load?
    OWNS_KEYS: bool = False
    OVER_ROWS: bool = False  # of a bias without rows of its own; or without keys
    OVER_KEYS: bool = False
    NEED_LSE: bool = True
    HAS_DLSE: bool = False
    HAS_LEFT: bool = False
    HAS_RIGHT: bool = False
    HAS_OFFSET: bool = False
    NEGATIVE: bool = False
    CHANGED: bool = False
    SOFTCAP: bool = False
    DROPOUT: bool = False
    HAS_KV_LENS: bool = False
    HAS_KV_STARTS: bool = False
    HAS_Q_OFFSET: bool = False
    HAS_MASK: bool = False
    HAS_BIAS: bool = False
    HAS_SLOPES: bool = False
    HAS_SINKS: bool = False
    HAS_SEGMENTS: bool = False
    VARLEN: bool = False
    PAGED: bool = False
    K_BITS: int = 0  # of codes; 0: values of T
    K_TOKENS: int = 0  # that share a scale, and channels; 0: all
    K_CHANNELS: int = 0
    K_SHIFT_TOKENS: int = -1  # likewise; -1: there are no shifts
    K_SHIFT_CHANNELS: int = 0
    V_BITS: int = 0
    V_TOKENS: int = 0
    V_CHANNELS: int = 0
    V_SHIFT_TOKENS: int = -1
    V_SHIFT_CHANNELS: int = 0


@cache
def kernel_text(name: str) -> str:
    """One file of kernels/, as it is."""
    return files("polyflash.backends.metal").joinpath("kernels", f"{name}.metal").read_text(encoding="utf-8")


def constants_text(c: Constants) -> str:
    return "\n".join(map(_constant, c._fields, c)) + "\n"


def _constant(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"typedef {value} {name};"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constant constexpr {kind} {name} = {str(value).lower()};"


def _operands_text() -> str:
    slots = ", ".join(f"{kind} {name} [[buffer({i})]]" for i, (name, kind) in enumerate(_OPERANDS))
    here = ", ".join(name for name, _ in _OPERANDS[:-2])
    return f"#define OPERANDS {slots}\n#define OPERANDS_HERE Operands{{{here}}}\n"


def source(kernel: str, c: Constants) -> str:
    """The whole text of a library with `kernel`."""
    parts = (_PREAMBLE, constants_text(c), struct_text(), _operands_text())
    return "\n".join((*parts, *map(kernel_text, FILES[kernel])))
