"""Who is timed on a GPU: polyflash and its peers, each as a function of one set of tensors.

`prepare(case, tensors)` of an arm returns the call to be timed; whatever it raises is the reason why the arm
has no figure. Calls of the parts forward, decode, graph and host return the output, those of backward the
gradients (dq, dk, dv).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from benchmarks.gpu.cases import BACKWARD, DECODE, FORWARD, GRAPH, HOST, PARTS, GpuCase
from polyflash.bench.suite import OURS

KERNELS = "benchmarks.gpu.kernels"
SLICE_TOLERANCE = {"bfloat16": 1.2e-2, "float16": 3e-3, "float32": 2e-5}  # relative L2 of a slice
Call = Callable[[], Any]


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
    compile time in."""

    name: str
    title: str
    parts: tuple[str, ...]
    prepare: Callable[[GpuCase, Tensors], Call]
    tried: str = ""
    patience: float = 60.0
    loosened: float = 1.0
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    last_tier: int = 9


def make_tensors(case: GpuCase, device: str, seed: int) -> Tensors:
    """Normal values from a seed, contiguous; they take gradients in the part backward alone."""
    generator = torch.Generator(device).manual_seed(seed)
    kind = getattr(torch, case.dtype)

    def drawn(heads: int, seqlen: int) -> Tensor:
        shape = (case.batch, heads, seqlen, case.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=kind)

    q = drawn(case.heads, case.seqlen_q)
    k, v = (drawn(case.kv_heads, case.seqlen_k) for _ in range(2))
    if case.part != BACKWARD:
        return Tensors(q, k, v)
    for x in (q, k, v):
        x.requires_grad_()
    return Tensors(q, k, v, drawn(case.heads, case.seqlen_q))


def _timed(case: GpuCase, t: Tensors, forward: Callable[[], Tensor]) -> Call:
    """The forward call itself, or the backward pass through an output made once."""
    if case.part != BACKWARD:
        return forward
    out = forward()
    return lambda: torch.autograd.grad(out, (t.q, t.k, t.v), t.dout, retain_graph=True)


def ours(case: GpuCase, t: Tensors, *, backend: str, config: Any = None) -> Call:
    """polyflash on one backend by name."""
    options: dict[str, Any] = {"backend": backend} | ({"config": config} if config is not None else {})
    return _timed(case, t, lambda: polyflash.attention(t.q, t.k, t.v, causal=case.causal, **options))


def varied(case: GpuCase, t: Tensors, *, backend: str, fields: Sequence[tuple[str, Any]]) -> Call:
    """polyflash with fields of its configuration replaced."""
    from dataclasses import replace

    chosen = polyflash.explain(t.q, t.k, t.v, causal=case.causal, backend=backend).config
    return ours(case, t, backend=backend, config=replace(chosen, **dict(fields)))


def sdpa(case: GpuCase, t: Tensors) -> Call:
    """torch SDPA; which of its kernels runs is the scope's affair."""
    grouped = case.heads != case.kv_heads
    run = partial(scaled_dot_product_attention, is_causal=case.causal, enable_gqa=grouped)
    return _timed(case, t, lambda: run(t.q, t.k, t.v))


def folded(case: GpuCase, t: Tensors) -> Call:
    """torch SDPA given the query heads of a key/value head as rows, which a decode step may do."""
    if case.seqlen_q != 1 or case.heads == case.kv_heads:
        raise ValueError("only for one query row and grouped heads")
    rows = t.q.view(case.batch, case.kv_heads, -1, case.head_dim)
    return lambda: scaled_dot_product_attention(rows, t.k, t.v).view(t.q.shape)


def flex(case: GpuCase, t: Tensors) -> Call:
    """FlexAttention, compiled for this very shape."""
    import torch._functorch.config
    import torch._inductor.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._inductor.config.compile_threads = 1  # no pool of processes of its own beside the suite's
    torch._functorch.config.donated_buffer = False  # the backward pass is run many times
    block_mask = None
    if case.causal:
        size, device = case.seqlen_q, str(t.q.device)
        block_mask = create_block_mask(_not_after, None, None, size, size, device=device)
    run = torch.compile(flex_attention, dynamic=False)
    grouped = case.heads != case.kv_heads
    return _timed(case, t, lambda: run(t.q, t.k, t.v, block_mask=block_mask, enable_gqa=grouped))


def _not_after(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return row >= key


def sage(case: GpuCase, t: Tensors) -> Call:
    """SageAttention with its own choice of kernel: Q and K in 8 bits."""
    module = import_module("sageattention")
    return lambda: module.sageattn(t.q, t.k, t.v, is_causal=case.causal)


def beside(function: str, case: GpuCase, t: Tensors) -> Call:
    """A peer kernel of `KERNELS`, imported in the process that runs it."""
    return getattr(import_module(KERNELS), function)(t.q, t.k, t.v, case.causal)


def _only(kernel: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    def scope() -> contextlib.AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, kernel))

    return scope


_DENSE = (FORWARD, BACKWARD)


def arms(backend: str, variants: Sequence[str] = ()) -> list[GpuArm]:
    """polyflash first. `variants`: more arms of ours such as "num_stages=4,block_n=64", forward only."""
    first = GpuArm(OURS, f"polyflash {backend}", PARTS, partial(ours, backend=backend), "shape")
    others = [
        GpuArm(
            f"{OURS}[{text}]",
            text,
            (FORWARD, DECODE),
            partial(varied, backend=backend, fields=fields(text)),
            "shape",
        )
        for text in variants
    ]
    return [
        first,
        *others,
        GpuArm("cudnn", "SDPA cuDNN", PARTS, sdpa, scope=_only("CUDNN_ATTENTION")),
        GpuArm("flash", "SDPA flash", PARTS, sdpa, scope=_only("FLASH_ATTENTION")),
        GpuArm("efficient", "SDPA efficient", PARTS, sdpa, scope=_only("EFFICIENT_ATTENTION")),
        GpuArm("folded", "SDPA folded", (DECODE, GRAPH), folded, scope=_only("FLASH_ATTENTION")),
        GpuArm("flex", "FlexAttention", (*_DENSE, DECODE), flex, "shape", 120.0, last_tier=2),
        GpuArm(
            "tutorial",
            "Triton tutorial's algorithm",
            (FORWARD, HOST),
            partial(beside, "tutorial"),
            "kernel",
            120.0,
        ),
        GpuArm("flag", "FlagAttention's algorithm", (FORWARD,), partial(beside, "single_loop"), "kernel"),
        GpuArm("sage", "SageAttention", (FORWARD,), sage, "kernel", loosened=8.0),
        GpuArm("math", "SDPA math", PARTS, sdpa, scope=_only("MATH")),
    ]


DEFAULT = ("polyflash", "cudnn", "flash", "efficient", "folded", "flex", "tutorial", "flag", "sage")


def fields(text: str) -> tuple[tuple[str, Any], ...]:
    """ "a=1,b=true,c=descriptor" as names and values."""
    plain = {"true": True, "false": False}
    found = []
    for part in text.split(","):
        name, _, value = part.partition("=")
        found.append((name.strip(), plain.get(value.lower(), int(value) if value.isdigit() else value)))
    return tuple(found)


def prepared(arm: GpuArm, case: GpuCase, sets: Sequence[Tensors]) -> list[Call]:
    """One call per set of tensors."""
    if case.part not in arm.parts:
        raise ValueError(f"not for {case.part}")
    with arm.scope():
        return [arm.prepare(case, t) for t in sets]


def applicable(every: Sequence[GpuArm], case: GpuCase) -> list[GpuArm]:
    """The arms that have the part and tier of a case; grouped decode rows alone have a folded form."""
    found = [arm for arm in every if case.part in arm.parts and case.tier <= arm.last_tier]
    return [arm for arm in found if arm.name != "folded" or case.heads != case.kv_heads]


def poison(t: Tensors) -> None:
    """Leaves NaN in the memory that the next outputs are given, so that elements nobody writes are seen: the
    last arm's right answer would stand there."""
    for x in [torch.full_like(y.detach(), math.nan) for y in (t.q, t.q, t.k, t.v)]:
        del x


def why(error: BaseException) -> str:
    """The reason for a table: the kind of an error and its first line."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line.strip()[:160]}"


def is_fatal(error: BaseException) -> bool:
    """Whether the device is lost for this process, so that every later call fails as well: asked of the
    device itself, as a capture that broke off, say, is an error of CUDA too and leaves it alive."""
    if not torch.cuda.is_initialized():
        return "CUDA error" in str(error)
    try:
        return torch.ones(1, device="cuda").item() != 1
    except RuntimeError:
        return True


def forget_compiled() -> None:
    """Every shape is compiled anew, so that torch's limit on recompilations never sends a call to its slow
    path; the files in its cache stay."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
