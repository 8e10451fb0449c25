"""One decode step on float16 keys and values: polyflash beside ggml's flash attention on this CPU.

    python -m benchmarks.decode.ggml --library FOLDER

FOLDER holds libggml-base.so and libggml-cpu.so, built as llama.cpp builds them (CMake, Release, GGML_NATIVE).
Nothing of ggml is a dependency of polyflash: the two libraries are called through ctypes. Both sides run in
this process by turns, on the same numbers, with as many threads as torch has; ggml takes q in float32, as it
always does, and one graph of one node per set of keys. The sets are larger than the last cache. Outputs are
compared before any time is taken, and both are held to float64.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import polyflash
from benchmarks.decode.problems import Turn, key_sets, queries, readers
from polyflash import target
from polyflash.bench import Arm, calibrate, compare
from polyflash.bench.check import sampled_error
from polyflash.bench.command import huge_pages
from polyflash.compare import worst_row
from polyflash.workloads import Workload

OURS, THEIRS = "polyflash", "ggml"
F32, F16 = 0, 1  # ggml_type
TOLERANCE = 3e-2  # of a row, relative L2: ggml sums float16 values in float16
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float


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
        "ggml_new_tensor_4d": (_POINTER, [_POINTER, _INT, *[ctypes.c_int64] * 4]),
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
    """ggml's call on one set: q (1, heads, 1, head_dim), k, v (1, num_kv_heads, seqlen_k, head_dim)."""

    def __init__(self, ggml: Any, q: Tensor, k: Tensor, v: Tensor, threads: int) -> None:
        self._ggml, self._shape = ggml, q.shape
        size = q.numel() * 8 + k.nbytes + v.nbytes + (16 << 20)
        self._context = ggml.init(InitParams(size, None, False))
        tensors = []
        for x, kind in ((q.float(), F32), (k, F16), (v, F16)):
            # Dimensions from the innermost: channels, rows, heads, batch.
            tensor = ggml.new_tensor_4d(self._context, kind, *reversed(x.shape))
            ctypes.memmove(ggml.get_data(tensor), x.contiguous().data_ptr(), x.nbytes)
            tensors.append(tensor)
        result = ggml.flash_attn_ext(self._context, *tensors, None, q.shape[-1] ** -0.5, 0.0, 0.0)
        self._graph, self._result = ggml.new_graph(self._context), ggml.get_data(result)
        ggml.build_forward_expand(self._graph, result)
        self._plan = ggml.graph_plan(self._graph, threads, None)
        self._work = ctypes.create_string_buffer(max(1, self._plan.work_size))
        self._plan.work_data = ctypes.addressof(self._work)

    def __call__(self) -> None:
        if self._ggml.graph_compute(self._graph, ctypes.byref(self._plan)):
            raise RuntimeError("ggml_graph_compute failed")

    def output(self) -> Tensor:
        """Of the last call, in the shape of q: for one row ggml's order of dimensions is the same."""
        out = torch.empty(self._shape, dtype=torch.float32)
        ctypes.memmove(out.data_ptr(), self._result, out.nbytes)
        return out


def measure(ggml: Any, heads: int, kv_heads: int, keys: int, head_dim: int, seconds: float) -> str:
    """A line: the median of every arm, our ratio and rate, and how far both are from float64."""
    w = Workload("ggml", frozenset(), 1, heads, kv_heads, 1, keys, head_dim, dtype="float16")
    turn, q = Turn(key_sets(w)), queries(w)
    steps = Turn([Step(ggml, q, s.k, s.v, torch.get_num_threads()) for s in turn.things])
    first, step = turn.things[0], steps.things[0]
    step()
    mine, theirs = polyflash.attention(q, first.k, first.v), step.output()
    errors = [sampled_error(q, first.k, first.v, out, None).relative for out in (mine, theirs)]
    if not (difference := worst_row(mine, theirs)) <= TOLERANCE:
        raise SystemExit(f"outputs differ by {difference:.1e}, wanted at most {TOLERANCE:.0e}")
    calls = {OURS: turn.each(lambda s: polyflash.attention(q, s.k, s.v)), THEIRS: steps.each(Step.__call__)}
    calls |= readers(turn)
    calibration = calibrate(target.detect("cpu"))
    arms = [Arm(name, call) for name, call in calls.items()]
    found = compare(arms, seconds=seconds, speed=calibration.speed if calibration else None)
    times = {name: found.summary(name) for name in calls}
    shown = "; ".join(f"{n} {s.median * 1e3:.2f} ms ±{s.spread:.0%}" for n, s in times.items())
    return (
        f"{heads}/{kv_heads}: {shown}; ratio {found.ratio(THEIRS, OURS):.2f}, ours"
        f" {first.bytes / times[OURS].median / 1e9:.1f} GB/s; from float64 {errors[0]:.1e}, ggml"
        f" {errors[1]:.1e} ({times[OURS].rounds} rounds{', contended' if found.contended else ''})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--library", type=Path, required=True, help="folder of libggml-base.so, libggml-cpu.so")
    add("--heads", default="8/8,32/8", help="query heads/kv heads, several with commas")
    add("--keys", type=int, default=16384)
    add("--head-dim", type=int, default=128)
    add("--seconds", type=float, default=3.0, help="per row")
    options = parser.parse_args()
    ggml = load(options.library)
    about = f"ggml {ggml.version().decode()} ({'with' if ggml.cpu_has_avx512() else 'without'} AVX-512)"
    print(
        f"{target.cpu_name()}, {torch.get_num_threads()} threads, huge pages: {huge_pages() or 'unknown'};"
        f" polyflash {polyflash.__version__}, torch {torch.__version__}, {about}"
    )
    print(f"float16, 1 query row, {options.keys} keys, head_dim {options.head_dim}")
    for pair in options.heads.split(","):
        with torch.no_grad():
            heads, kv_heads = map(int, pair.split("/"))
            line = measure(ggml, heads, kv_heads, options.keys, options.head_dim, options.seconds)
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
