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
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import polyflash
from benchmarks.decode.keys import IN_ORDER, PLACES, KeySet, Turn, key_sets, reading
from polyflash import target
from polyflash.bench import Arm, calibrate, compare
from polyflash.bench.check import sampled_error
from polyflash.bench.command import cpu_name, huge_pages
from polyflash.bench.timing import Summary
from polyflash.compare import worst_row
from polyflash.workloads import Workload

OURS, THEIRS = "polyflash", "ggml"
F32, F16 = 0, 1  # ggml_type
TOLERANCE = 3e-2  # of a row, relative L2: ggml sums float16 values in float16


class InitParams(ctypes.Structure):
    """`struct ggml_init_params`"""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Plan(ctypes.Structure):
    """`struct ggml_cplan`"""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


class Ggml:
    """The two libraries, with the types of the few functions used."""

    def __init__(self, folder: Path) -> None:
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        for library, name, result, arguments in (
            (self.base, "ggml_init", pointer, [InitParams]),
            (self.base, "ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int, *[number] * 4]),
            (self.base, "ggml_get_data", pointer, [pointer]),
            (self.base, "ggml_flash_attn_ext", pointer, [*[pointer] * 5, *[ctypes.c_float] * 3]),
            (self.base, "ggml_new_graph", pointer, [pointer]),
            (self.base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (self.base, "ggml_version", ctypes.c_char_p, []),
            (self.cpu, "ggml_cpu_init", None, []),
            (self.cpu, "ggml_graph_plan", Plan, [pointer, ctypes.c_int, pointer]),
            (self.cpu, "ggml_graph_compute", ctypes.c_int, [pointer, pointer]),
            (self.cpu, "ggml_cpu_has_avx512", ctypes.c_int, []),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.cpu.ggml_cpu_init()

    @property
    def about(self) -> str:
        wide = "with" if self.cpu.ggml_cpu_has_avx512() else "without"
        return f"ggml {self.base.ggml_version().decode()} ({wide} AVX-512)"


class Step:
    """ggml's call on one set: q (1, heads, 1, head_dim), k, v (1, num_kv_heads, seqlen_k, head_dim)."""

    def __init__(self, ggml: Ggml, q: Tensor, k: Tensor, v: Tensor, threads: int) -> None:
        base, self._cpu = ggml.base, ggml.cpu
        size = q.numel() * 8 + k.nbytes + v.nbytes + (16 << 20)
        self._context = base.ggml_init(InitParams(size, None, False))
        tensors = []
        for x, kind in ((q.float(), F32), (k, F16), (v, F16)):
            # Dimensions from the innermost: channels, rows, heads, batch.
            tensor = base.ggml_new_tensor_4d(self._context, kind, *reversed(x.shape))
            ctypes.memmove(base.ggml_get_data(tensor), x.contiguous().data_ptr(), x.nbytes)
            tensors.append(tensor)
        result = base.ggml_flash_attn_ext(self._context, *tensors, None, q.shape[-1] ** -0.5, 0.0, 0.0)
        self._graph = base.ggml_new_graph(self._context)
        base.ggml_build_forward_expand(self._graph, result)
        self._plan = self._cpu.ggml_graph_plan(self._graph, threads, None)
        self._work = ctypes.create_string_buffer(max(1, self._plan.work_size))
        self._plan.work_data = ctypes.addressof(self._work)
        self._result, self._shape = base.ggml_get_data(result), q.shape

    def __call__(self) -> None:
        if self._cpu.ggml_graph_compute(self._graph, ctypes.byref(self._plan)):
            raise RuntimeError("ggml_graph_compute failed")

    def output(self) -> Tensor:
        """Of the last call, in the shape of q: for one row ggml's order of dimensions is the same."""
        out = torch.empty(self._shape, dtype=torch.float32)
        ctypes.memmove(out.data_ptr(), self._result, out.nbytes)
        return out


def measure(
    ggml: Ggml, heads: int, kv_heads: int, keys: int, head_dim: int, seconds: float
) -> dict[str, Any]:
    """The summary of every arm by its name, and what else is printed."""
    w = Workload("ggml", frozenset(), 1, heads, kv_heads, 1, keys, head_dim, dtype="float16")
    turn, threads = Turn(key_sets(w)), torch.get_num_threads()
    q = torch.randn(1, heads, 1, head_dim, generator=torch.Generator().manual_seed(2)).half()
    pairs = Turn([(s, Step(ggml, q, s.k, s.v, threads)) for s in turn.things])

    def ours(s: KeySet) -> Tensor:
        return polyflash.attention(q, s.k, s.v)

    keyset, step = pairs()
    step()
    mine, found_by_ggml = ours(keyset), step.output()
    errors = [sampled_error(q, keyset.k, keyset.v, out, None).relative for out in (mine, found_by_ggml)]
    difference = worst_row(mine, found_by_ggml)
    if not difference <= TOLERANCE:
        raise SystemExit(f"outputs differ by {difference:.1e}, wanted at most {TOLERANCE:.0e}")
    arms = [
        Arm(OURS, lambda: ours(turn())),
        Arm(THEIRS, lambda: pairs()[1]()),
        *(Arm(name, reading(turn, name)) for name in (IN_ORDER, PLACES) if name in keyset.reads),
    ]
    calibration = calibrate(target.detect("cpu"))
    found = compare(arms, seconds=seconds, speed=calibration.speed if calibration else None)
    return {
        "bytes": keyset.bytes,
        "errors": errors,
        "contended": found.contended,
        "rounds": found.summary(OURS).rounds,
        **{arm.name: found.summary(arm.name) for arm in arms},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--library", type=Path, required=True, help="folder of libggml-base.so, libggml-cpu.so"
    )
    parser.add_argument("--heads", default="8/8,32/8", help="query heads/kv heads, several with commas")
    parser.add_argument("--keys", type=int, default=16384)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0, help="per row")
    options = parser.parse_args()
    ggml, console = Ggml(options.library), Console(highlight=False, soft_wrap=True)
    console.print(
        f"{cpu_name()}, {torch.get_num_threads()} threads, huge pages: {huge_pages() or 'unknown'};"
        f" polyflash {polyflash.__version__}, torch {torch.__version__}, {ggml.about}"
    )
    console.print(f"float16, 1 query row, {options.keys} keys, head_dim {options.head_dim}")
    for pair in options.heads.split(","):
        heads, kv_heads = map(int, pair.split("/"))
        with torch.no_grad():
            r = measure(ggml, heads, kv_heads, options.keys, options.head_dim, options.seconds)
        arms = {name: s for name, s in r.items() if isinstance(s, Summary)}
        shown = [f"{name} {s.median * 1e3:.2f} ms ±{s.spread:.0%}" for name, s in arms.items()]
        ratio, rate = arms[THEIRS].median / arms[OURS].median, r["bytes"] / arms[OURS].median / 1e9
        console.print(
            f"{pair}: {'; '.join(shown)}; ratio {ratio:.2f}, ours {rate:.1f} GB/s; from float64"
            f" {r['errors'][0]:.1e}, ggml {r['errors'][1]:.1e}"
            f" ({r['rounds']} rounds{', contended' if r['contended'] else ''})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
