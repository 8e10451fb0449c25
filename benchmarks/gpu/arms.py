"""What is timed on a GPU, the most telling first (a run that is cut short has measured what matters), and
who: polyflash and its peers, each as a function of one set of tensors.

`prepare(case, tensors)` of an arm returns the call to be timed; whatever it raises is the reason why the arm
has no figure. Calls of the parts forward, decode, graph and host return the output, those of backward the
gradients (dq, dk, dv).
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from benchmarks import peers
from polyflash.bench.suite import OURS
from polyflash.quant import NAMED, Scheme, quantize
from polyflash.spec import AttentionSpec, Phase
from polyflash.work import Work, work_of

FORWARD, BACKWARD, DECODE, GRAPH, HOST = "forward", "backward", "decode", "graph", "host"
ROWS, CODES, STEPS = "rows", "codes", "steps"
PARTS = (FORWARD, BACKWARD, DECODE, GRAPH, HOST)
ASKED = (ROWS, CODES, STEPS)  # parts that run where they are named alone
TOKENS, WIDTH = 16384, 2048  # batch·seqlen and heads·head_dim of the table of the FlashAttention-3 paper
_KEYS = 1 << 21  # most keys of a decode batch: 8.6 GiB of keys and values at 8 heads of 128 in 16 bits
_PHASES = {BACKWARD: Phase.BACKWARD, **dict.fromkeys((DECODE, GRAPH, STEPS), Phase.DECODE)}
_EITHER, _GROUPED = (False, True), (32, 8)  # causal or not; query heads over 8 of keys and values
_OVER_CODES = "steps over codes, 32 heads over 8"
_FEW_KEYS = (64, 256, 400, 512, 1000, 1024, 2048, 4096)
_FEW_ROWS = (1, 2, 3, 4, 8, 9, 16, 32, 63, 64, 65, 128, 256, 512)
KERNELS = "benchmarks.gpu.kernels"
TOKEN, EIGHTS = Scheme(compute="int8"), Scheme(dtype="fp8_e4m3", granularity="head", compute="fp8")
# More arms of ours: of the parts "codes", which multiplies codes, and "steps", which reads them. The backend,
# "" as polyflash's; schemes of K and of V; how many times the error of 16 bits is allowed.
CODED: dict[str, tuple[str, str, tuple[Scheme | None, Scheme | None], float]] = {
    "free": (CODES, "free", (None, None), 1.0),
    "int8": (CODES, "triton", (TOKEN, TOKEN), 2.1),
    "int8-k": (CODES, "triton", (TOKEN, None), 2.1),
    "int8-head": (CODES, "triton", (replace(TOKEN, granularity="head"), None), 2.1),
    "fp8-gluon": (CODES, "gluon", (EIGHTS, EIGHTS), 6.7),
    "fp8-triton": (CODES, "triton", (EIGHTS, EIGHTS), 6.7),
    **{f"kv-{name}": (STEPS, "", NAMED[name], 2.0) for name in ("int8", "int8-channel")},
    "kv-fp8": (STEPS, "", NAMED["fp8"], 6.7),
    **{f"kv-{name}": (STEPS, "", NAMED[name], 20.0) for name in ("int4-token", "int4", "mxfp4")},
}
PEERS = ("cudnn", "flash", "efficient", "folded", "flex", "tutorial", "flag", "sage")
DEFAULT = (OURS, *PEERS, *CODED)
Call = Callable[[], Any]


@dataclass(frozen=True)
class GpuCase:
    """One problem and what is timed of it. `tier`: 0 is measured first. `table`: where its row is printed."""

    part: str
    table: str
    tier: int
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False

    @property
    def name(self) -> str:
        """Of a row in files, tables and `--filter`."""
        kind = f"{self.part}-{'causal' if self.causal else 'full'}-{self.dtype}-d{self.head_dim}"
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}.{self.kv_heads}"
        return f"{kind}-b{self.batch}-h{heads}-q{self.seqlen_q}-k{self.seqlen_k}"

    @property
    def work(self) -> Work:
        """FLOPs of visible pairs; bytes of inputs and outputs."""
        phase, d = _PHASES.get(self.part, Phase.FORWARD), self.head_dim
        sizes = self.batch, self.heads, self.kv_heads, self.seqlen_q, self.seqlen_k, d, d
        return work_of(AttentionSpec(phase, self.dtype, "cuda", *sizes, frozenset(), causal=self.causal))

    @property
    def key_bytes(self) -> int:
        """Of keys and values, read once: what a decode step has to fetch."""
        size = 4 if self.dtype == "float32" else 2
        return 2 * self.batch * self.kv_heads * self.seqlen_k * self.head_dim * size


def rows() -> list[GpuCase]:
    """Every row once, by tier; within a tier as listed here."""
    first: dict[str, GpuCase] = {}
    for case in sorted((*_squares(), *_steps()), key=lambda case: case.tier):
        first.setdefault(case.name, case)
    return list(first.values())


def tiny() -> list[GpuCase]:
    """One small row of every part: the whole program on any machine, with figures that mean nothing."""
    sizes = (  # part, tier, batch, heads, kv_heads, seqlen_q, seqlen_k, causal
        *((FORWARD, 0, 1, 2, 2, 64, 64, False), (FORWARD, 0, 1, 2, 2, 64, 64, True)),
        *((BACKWARD, 0, 1, 2, 2, 64, 64, True), (DECODE, 1, 2, 4, 2, 1, 96, False)),
        *((GRAPH, 1, 1, 2, 2, 1, 64, False), (HOST, 1, 1, 2, 2, 32, 32, False)),
        *((ROWS, 1, 1, 4, 2, 8, 64, True), (CODES, 1, 1, 2, 2, 64, 64, False)),
        (STEPS, 1, 1, 4, 2, 1, 64, False),
    )
    return [GpuCase(x[0], f"tiny {x[0]}", x[1], "float32", *x[2:7], 16, x[7]) for x in sizes]


def selected(
    every: Sequence[GpuCase], *, words: Sequence[str] = (), parts: Sequence[str] = ()
) -> list[GpuCase]:
    """Rows whose name has every word as one of its dash-separated pieces, of the given parts (none: all but
    those that are asked for)."""
    chosen = [c for c in every if (c.part in parts if parts else c.part not in ASKED)]
    return [c for c in chosen if set(words) <= set(c.name.split("-"))]


def _square(
    part: str, tier: int, dtype: str, dim: int, n: int, causal: bool, *, batch: int = 0, heads: int = 0,
    kv_heads: int = 0, table: str = "",
) -> GpuCase:  # fmt: skip
    """A prefill or its gradients: a cell of the paper's table, as many requests as make its tokens, as many
    heads as make its width, unless it is given others."""
    batch, heads = batch or max(1, TOKENS // n), heads or WIDTH // dim
    table = f"{part}, {table or f'{dtype}, {TOKENS // 1024}k tokens, {WIDTH} channels'}"
    return GpuCase(part, table, tier, dtype, batch, heads, kv_heads or heads, n, n, dim, causal)


def _squares() -> Iterator[GpuCase]:
    """Those of float32 have products that keep 24 bits."""
    half, grouped = "bfloat16", {"kv_heads": 2, "table": "bfloat16, 16 heads over 2"}
    wide: dict[str, Any] = {"batch": 4, "heads": 48, "table": "batch 4, 48 heads"}
    tutorial: dict[str, Any] = {
        "batch": 4,
        "heads": 32,
        "table": "float16, the shapes of the Triton tutorial",
    }
    for part, tier, dtype, dims, lengths, masks, given in (
        (FORWARD, 0, half, (128,), (8192, 4096, 1024, 16384, 2048), _EITHER, {}),
        (FORWARD, 1, half, (64,), (8192, 1024, 16384, 4096, 2048), _EITHER, {}),
        (FORWARD, 3, half, (256,), (8192, 1024, 4096, 16384, 2048), _EITHER, {}),
        (BACKWARD, 0, half, (128,), (8192, 2048), _EITHER, {}),
        (BACKWARD, 1, half, (64,), (8192, 2048), _EITHER, {}),
        (BACKWARD, 2, half, (128,), (1024, 4096, 16384), _EITHER, {}),
        (BACKWARD, 3, half, (64,), (1024, 4096, 16384), _EITHER, {}),
        (FORWARD, 4, half, (128,), (4096, 8192, 1024, 2048), _EITHER, wide),
        (BACKWARD, 5, half, (128,), (4096, 1024), _EITHER, wide),
        (FORWARD, 3, "float16", (128, 64), (1024, 4096), _EITHER, tutorial),
        (FORWARD, 5, "float16", (128, 64), (16384, 2048, 8192), _EITHER, tutorial),
        (FORWARD, 4, half, (128,), (2048, 8192), _EITHER, grouped),
        (BACKWARD, 5, "float16", (128,), (4096,), (True,), {}),
        (CODES, 0, half, (128, 64, 256), (8192, 4096, 16384, 2048), _EITHER, {}),
        (
            CODES,
            1,
            half,
            (128,),
            (4096, 16384),
            _EITHER,
            {"kv_heads": 4, "table": "bfloat16, 16 heads over 4"},
        ),
    ):
        for n, dim, causal in product(lengths, dims, masks):
            yield _square(part, tier, dtype, dim, n, causal, **given)
    for (heads, n), dim, causal, part in product(((8, 2048), (16, 8192)), (64, 128), _EITHER, PARTS[:2]):
        yield _square(part, 2, "float32", dim, n, causal, batch=1, heads=heads, table="float32")


def _steps() -> Iterator[GpuCase]:
    """Decode steps; calls whose time is the host's, one launch, or two; and few rows to many: does a kernel
    that takes over from another leave a step?"""
    small, host = "small decode steps in a CUDA graph", "host time of a call"
    for part, tier, table, batches, lengths, heads, dtype in (
        (DECODE, 1, "", (8, 64), (8192, 32768), _GROUPED, "bfloat16"),
        (DECODE, 2, "", (1, 16, 128), (1024, 8192), _GROUPED, "bfloat16"),
        (DECODE, 3, "", (1, 8), (65536, 262144), _GROUPED, "bfloat16"),
        (DECODE, 4, "", (1, 4, 16, 64), (1024, 4096, 16384, 131072), _GROUPED, "bfloat16"),
        (GRAPH, 1, small, (1, 4), (1024,), _GROUPED, "bfloat16"),
        (HOST, 2, host, (1,), (128, 4096), (32,), "bfloat16"),
        (DECODE, 2, "decode, float32", (1, 8), (8192,), _GROUPED, "float32"),
        (DECODE, 2, "decode, float32", (64,), (1024,), _GROUPED, "float32"),
    ):
        for batch, n, h in product(batches, lengths, heads):
            if batch * n <= _KEYS:
                named = table or f"decode, {h} heads over 8"
                yield GpuCase(part, named, tier, dtype, batch, h, 8, 1, n, 128)
    yield GpuCase(HOST, host, 1, "bfloat16", 1, 8, 8, 128, 128, 64)
    yield GpuCase(HOST, host, 2, "bfloat16", 1, 8, 8, 128, 4096, 128)
    sizes = (
        (64, 8192, 1),
        (16, 8192, 1),
        (1, 65536, 1),
        (1, 1024, 1),
        (1, 4096, 1),
        (16, 8192, 4),
        (1, 4096, 4),
    )
    for batch, n, count in sizes:
        yield GpuCase(STEPS, _OVER_CODES, 0, "bfloat16", batch, 32, 8, count, n, 128)
    for dim, batch, n in product((128, 64), (1, 4, 16, 64, 256), (1 << i for i in range(10, 18))):
        if batch * n <= _KEYS:
            yield GpuCase(STEPS, _OVER_CODES, 1, "bfloat16", batch, 32, 8, 1, n, dim)
    for group, n, count in product((1, 4, 8), _FEW_KEYS, _FEW_ROWS):
        if count <= n:
            table = f"rows in a CUDA graph, {8 * group} heads over 8"
            yield GpuCase(ROWS, table, 0, "bfloat16", 1, 8 * group, 8, count, n, 128, True)


@dataclass(frozen=True)
class Tensors:
    """One set of inputs: q (batch, heads, seqlen_q, head_dim), k and v (batch, kv_heads, seqlen_k, head_dim),
    and for gradients dout, like q."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None


@dataclass(frozen=True)
class GpuArm:
    """One implementation. `tried`: its kernels are compiled here, so a child process runs them first, and is
    killed after `patience` seconds: for every "shape", or once per "kernel" (part, dtype, head_dim, causal);
    "": they come with torch. `loosened`: how much more error than rounding it is allowed, for peers that
    quantise. `scope`: entered around calls, outside the clock. `last_tier`: of the rows it is worth its
    compile time in. `chosen`: the name of the row of ours that runs it."""

    name: str
    title: str
    parts: tuple[str, ...]
    prepare: Callable[[GpuCase, Tensors], Call]
    tried: str = ""
    patience: float = 60.0
    loosened: float = 1.0
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    last_tier: int = 9
    chosen: Callable[[GpuCase, Tensors], str] = lambda *_: ""

    def prepared(self, case: GpuCase, sets: Sequence[Tensors]) -> list[Call]:
        """One call per set of tensors."""
        with self.scope():
            return [self.prepare(case, t) for t in sets]


def make_tensors(case: GpuCase, device: str, seed: int) -> Tensors:
    """Normal values from a seed, contiguous; they take gradients in the part backward alone."""
    generator, backward = torch.Generator(device).manual_seed(seed), case.part == BACKWARD

    def drawn(heads: int, seqlen: int, graph: bool = backward) -> Tensor:
        shape, dtype = (case.batch, heads, seqlen, case.head_dim), getattr(torch, case.dtype)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype, requires_grad=graph)

    q = drawn(case.heads, case.seqlen_q)
    k, v = (drawn(case.kv_heads, case.seqlen_k) for _ in range(2))
    return Tensors(q, k, v, drawn(case.heads, case.seqlen_q, False) if backward else None)


def _timed(case: GpuCase, t: Tensors, forward: Callable[[], Tensor]) -> Call:
    """The forward call itself, or the backward pass through an output made once."""
    if case.part != BACKWARD:
        return forward
    out = forward()
    return lambda: torch.autograd.grad(out, (t.q, t.k, t.v), t.dout, retain_graph=True)


@dataclass(frozen=True)
class Ours:
    """polyflash on one backend by name or, "free", the chosen one; over codes of K and of V by these schemes,
    with fields of its config replaced."""

    backend: str
    schemes: tuple[Scheme | None, Scheme | None] = (None, None)
    fields: tuple[tuple[str, Any], ...] = ()

    def _operands(self, case: GpuCase, t: Tensors) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        pairs = zip((t.k, t.v), self.schemes, strict=True)
        kv = [x if scheme is None else quantize(x, scheme) for x, scheme in pairs]
        options: dict[str, Any] = {"causal": case.causal}
        options["backend"] = None if self.backend == "free" else self.backend
        return (t.q, *kv), options, polyflash.explain(t.q, *kv, **options)

    def __call__(self, case: GpuCase, t: Tensors) -> Call:
        given, options, plan = self._operands(case, t)
        computes = {scheme.compute for scheme in self.schemes if scheme} - {"int8"}  # which decodes V
        if computes and "in the walk" not in plan.notes[-1]:
            raise ValueError(f"no kernel of {self.backend} reads these codes here")
        if self.fields:
            options["config"] = replace(plan.config, **dict(self.fields))
        return _timed(case, t, lambda: polyflash.attention(*given, **options))

    def chosen(self, case: GpuCase, t: Tensors) -> str:
        """The row that runs it."""
        row = self._operands(case, t)[2].chosen
        return row.name if row else ""


def sdpa(case: GpuCase, t: Tensors) -> Call:
    """torch SDPA; which of its kernels runs is the scope's affair."""
    grouped = case.heads != case.kv_heads
    run = partial(scaled_dot_product_attention, is_causal=case.causal, enable_gqa=grouped)
    return _timed(case, t, lambda: run(t.q, t.k, t.v))


def folded(case: GpuCase, t: Tensors) -> Call:
    """torch SDPA given the query heads of a key/value head as rows, which a decode step may do."""
    rows = t.q.view(case.batch, case.kv_heads, -1, case.head_dim)
    return lambda: scaled_dot_product_attention(rows, t.k, t.v).view(t.q.shape)


def flex(case: GpuCase, t: Tensors) -> Call:
    """FlexAttention, compiled for this very shape."""
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no pool of processes of its own beside the suite's
    torch._functorch.config.donated_buffer = False  # the backward pass is run many times
    return _timed(case, t, peers.flexattention(t.q, t.k, t.v, case.causal))


def sage(case: GpuCase, t: Tensors) -> Call:
    """SageAttention with its own choice of kernel: Q and K in 8 bits."""
    return partial(import_module("sageattention").sageattn, t.q, t.k, t.v, is_causal=case.causal)


def beside(function: str, case: GpuCase, t: Tensors) -> Call:
    """A peer kernel of `KERNELS`, imported in the process that runs it."""
    call: Call = getattr(import_module(KERNELS), function)(t.q, t.k, t.v, case.causal)
    return call


def _only(kernel: str) -> Callable[[], AbstractContextManager[Any]]:
    return partial(sdpa_kernel, getattr(SDPBackend, kernel))


def arms(backend: str, variants: Sequence[str] = ()) -> list[GpuArm]:
    """polyflash first. `variants`: more arms of ours, "num_stages=4,block_n=64" of the first one, of another
    one "int8:num_stages=4"; no gradients."""
    tutorial, flag = partial(beside, "tutorial"), partial(beside, "single_loop")
    own: dict[str, tuple[tuple[str, ...], Ours, float]] = {OURS: ((*PARTS, *ASKED), Ours(backend), 1.0)}
    for name, (part, where, schemes, loosened) in CODED.items():
        own[name] = (part,), Ours(where or backend, schemes), loosened
    for text in variants:
        name, _, change = text.rpartition(":")
        parts, call, loosened = own[name or OURS]
        call = replace(call, fields=fields(change))
        own[f"{name or OURS}[{change}]"] = tuple(p for p in parts if p != BACKWARD), call, loosened
    title = {OURS: f"polyflash {backend}"}
    every = (*PARTS, CODES)
    return [
        *(
            GpuArm(name, title.get(name, name), parts, call, "shape", loosened=allowed, chosen=call.chosen)
            for name, (parts, call, allowed) in own.items()
        ),
        GpuArm("cudnn", "SDPA cuDNN", every, sdpa, scope=_only("CUDNN_ATTENTION")),
        GpuArm("flash", "SDPA flash", PARTS, sdpa, scope=_only("FLASH_ATTENTION")),
        GpuArm("efficient", "SDPA efficient", PARTS, sdpa, scope=_only("EFFICIENT_ATTENTION")),
        GpuArm("folded", "SDPA folded", (DECODE, GRAPH), folded, scope=_only("FLASH_ATTENTION")),
        GpuArm("flex", "FlexAttention", (FORWARD, BACKWARD, DECODE), flex, "shape", 120.0, last_tier=2),
        GpuArm("tutorial", "Triton tutorial's algorithm", (FORWARD, HOST), tutorial, "kernel", 120.0),
        GpuArm("flag", "FlagAttention's algorithm", (FORWARD,), flag, "kernel"),
        GpuArm("sage", "SageAttention", (FORWARD,), sage, "kernel", loosened=8.0),
        GpuArm("math", "SDPA math", every, sdpa, scope=_only("MATH")),
    ]


def fields(text: str) -> tuple[tuple[str, Any], ...]:
    """ "a=1,b=true,c=descriptor" as names and values."""
    plain = {"true": True, "false": False}
    pairs = ((name.strip(), value) for name, _, value in (part.partition("=") for part in text.split(",")))
    return tuple((name, plain.get(x.lower(), int(x) if x.isdigit() else x)) for name, x in pairs)


def applicable(every: Sequence[GpuArm], case: GpuCase) -> list[GpuArm]:
    """The arms that have the part and tier of a case; grouped decode rows alone have a folded form."""
    found = [arm for arm in every if case.part in arm.parts and case.tier <= arm.last_tier]
    return [arm for arm in found if arm.name != "folded" or case.heads != case.kv_heads]


def poison(t: Tensors) -> None:
    """Leaves NaN in the memory that the next outputs are given, so that elements nobody writes are seen: the
    last arm's right answer would stand there."""
    for x in [torch.full_like(y.detach(), math.nan) for y in (t.q, t.q, t.k, t.v)]:
        del x


def is_fatal(error: BaseException) -> bool:
    """Whether the device is lost for this process, so that every later call fails as well: asked of the
    device itself, as a capture that broke off, say, is an error of CUDA too and leaves it alive."""
    if not torch.cuda.is_initialized():
        return "CUDA error" in str(error)
    try:
        return torch.ones(1, device="cuda").item() != 1
    except RuntimeError:
        return True


def forget() -> None:
    """Frees what a row held. Every shape is compiled anew, so that torch's limit on recompilations sends no
    call to its slow path; the files in its cache stay."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
