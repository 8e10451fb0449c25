"""One decode step by ggml's flash attention on this CPU, through ctypes: an arm of the suite "decode".

Nothing of ggml is a dependency of polyflash. ggml takes q in float32, as it always does, and one graph of one
node per set of keys; K and V as float16, or in its own codes: blocks of 32 channels of a token with one
float16 scale each.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

KINDS = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}  # ggml_type
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float
_LONG = ctypes.c_int64


def _struct(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": [*fields.items()]})


InitParams = _struct("ggml_init_params", mem_size=_SIZE, mem_buffer=_POINTER, no_alloc=ctypes.c_bool)
Plan = _struct(
    "ggml_cplan", work_size=_SIZE, work_data=_POINTER, n_threads=_INT, threadpool=_POINTER,
    abort_callback=_POINTER, abort_callback_data=_POINTER, use_ref=ctypes.c_bool,
)  # fmt: skip
_FUNCTIONS: dict[
    str, dict[str, tuple[Any, list[Any]]]
] = {  # library: function: what it returns, what it takes
    "base": {
        "ggml_init": (_POINTER, [InitParams]),
        "ggml_new_tensor_4d": (_POINTER, [_POINTER, _INT, *[_LONG] * 4]),
        "ggml_quantize_chunk": (_SIZE, [_INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER]),
        "ggml_get_data": (_POINTER, [_POINTER]),
        "ggml_flash_attn_ext": (_POINTER, [*[_POINTER] * 5, *[_FLOAT] * 3]),
        "ggml_new_graph": (_POINTER, [_POINTER]),
        "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
        "ggml_version": (ctypes.c_char_p, []),
    },
    "cpu": {
        "ggml_cpu_init": (None, []),
        "ggml_graph_plan": (Plan, [_POINTER, _INT, _POINTER]),
        "ggml_graph_compute": (_INT, [_POINTER, _POINTER]),
        "ggml_cpu_has_avx512": (_INT, []),
    },
}


def load(folder: Path) -> Any:
    """The few functions used, of both libraries, with their types."""
    found = SimpleNamespace()
    for library, functions in _FUNCTIONS.items():
        loaded = ctypes.CDLL(str(folder / f"libggml-{library}.so"), mode=ctypes.RTLD_GLOBAL)
        for name, (result, arguments) in functions.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
            setattr(found, name.removeprefix("ggml_"), function)
    found.cpu_init()
    return found


class Step:
    """ggml's call on one set: q (1, heads, 1, head_dim), k, v (1, num_kv_heads, seqlen_k, head_dim), all
    float32; `kind`, of KINDS, is what K and V are kept as."""

    def __init__(self, ggml: Any, q: Tensor, k: Tensor, v: Tensor, kind: str, threads: int) -> None:
        self._ggml, self._shape = ggml, q.shape
        size = q.numel() * 8 + k.nbytes + v.nbytes + (16 << 20)
        self._context = ggml.init(InitParams(size, None, False))
        tensors = []
        for x, name in ((q, "f32"), (k, kind), (v, kind)):
            # Dimensions from the innermost: channels, rows, heads, batch.
            tensor = ggml.new_tensor_4d(self._context, KINDS[name], *reversed(x.shape))
            place, x = ggml.get_data(tensor), x.contiguous()
            if name == "f32":
                ctypes.memmove(place, x.data_ptr(), x.nbytes)
            else:
                rows, width = x.numel() // x.shape[-1], x.shape[-1]
                ggml.quantize_chunk(KINDS[name], x.data_ptr(), place, 0, rows, width, None)
            tensors.append(tensor)
        result = ggml.flash_attn_ext(self._context, *tensors, None, q.shape[-1] ** -0.5, 0.0, 0.0)
        self._graph, self._result = ggml.new_graph(self._context), ggml.get_data(result)
        ggml.build_forward_expand(self._graph, result)
        self._plan = ggml.graph_plan(self._graph, threads, None)
        self._work = ctypes.create_string_buffer(max(1, self._plan.work_size))
        self._plan.work_data = ctypes.addressof(self._work)

    def __call__(self) -> Tensor:
        """Its output, in the shape of q: for one row ggml's order of dimensions is the same."""
        if self._ggml.graph_compute(self._graph, ctypes.byref(self._plan)):
            raise RuntimeError("ggml_graph_compute failed")
        out = torch.empty(self._shape, dtype=torch.float32)
        ctypes.memmove(out.data_ptr(), self._result, out.nbytes)
        return out
