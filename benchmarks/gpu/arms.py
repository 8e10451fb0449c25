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
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from benchmarks import peers
from benchmarks.gpu.cases import BACKWARD, DECODE, FORWARD, GRAPH, HOST, PARTS, GpuCase
from polyflash.bench.suite import OURS

KERNELS = "benchmarks.gpu.kernels"
Call = Callable[[], Any]
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


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
    scope: Scope = contextlib.nullcontext
    last_tier: int = 9


def make_tensors(case: GpuCase, device: str, seed: int) -> Tensors:
    """Normal values from a seed, contiguous; they take gradients in the part backward alone."""
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(heads: int, seqlen: int, **options: Any) -> Tensor:
        shape, dtype = (case.batch, heads, seqlen, case.head_dim), getattr(torch, case.dtype)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype, **options)

    graph = {"requires_grad": case.part == BACKWARD}
    q = drawn(case.heads, case.seqlen_q, **graph)
    k, v = (drawn(case.kv_heads, case.seqlen_k, **graph) for _ in range(2))
    return Tensors(q, k, v, drawn(case.heads, case.seqlen_q) if case.part == BACKWARD else None)


def _timed(case: GpuCase, t: Tensors, forward: Callable[[], Tensor]) -> Call:
    """The forward call itself, or the backward pass through an output made once."""
    if case.part != BACKWARD:
        return forward
    out = forward()
    return lambda: torch.autograd.grad(out, (t.q, t.k, t.v), t.dout, retain_graph=True)


def ours(case: GpuCase, t: Tensors, *, backend: str, fields: Sequence[tuple[str, Any]] = ()) -> Call:
    """polyflash on one backend by name, with fields of its configuration replaced."""
    options: dict[str, Any] = {"backend": backend, "causal": case.causal}
    if fields:
        chosen = polyflash.explain(t.q, t.k, t.v, **options).config
        options["config"] = replace(chosen, **dict(fields))
    return _timed(case, t, lambda: polyflash.attention(t.q, t.k, t.v, **options))


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

    torch._inductor.config.compile_threads = 1  # no pool of processes of its own beside the suite's
    torch._functorch.config.donated_buffer = False  # the backward pass is run many times
    return _timed(case, t, peers.flexattention(t.q, t.k, t.v, case.causal))


def sage(case: GpuCase, t: Tensors) -> Call:
    """SageAttention with its own choice of kernel: Q and K in 8 bits."""
    module = import_module("sageattention")
    return lambda: module.sageattn(t.q, t.k, t.v, is_causal=case.causal)


def beside(function: str, case: GpuCase, t: Tensors) -> Call:
    """A peer kernel of `KERNELS`, imported in the process that runs it."""
    return getattr(import_module(KERNELS), function)(t.q, t.k, t.v, case.causal)


def _only(kernel: str) -> Scope:
    def scope() -> contextlib.AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, f"{kernel}_ATTENTION" if kernel != "MATH" else kernel))

    return scope


def arms(backend: str, variants: Sequence[str] = ()) -> list[GpuArm]:
    """polyflash first. `variants`: more arms of ours such as "num_stages=4,block_n=64", forward only."""
    made = [GpuArm(OURS, f"polyflash {backend}", PARTS, partial(ours, backend=backend), "shape")]
    for text in variants:
        call = partial(ours, backend=backend, fields=fields(text))
        made.append(GpuArm(f"{OURS}[{text}]", text, (FORWARD, DECODE), call, "shape"))
    tutorial, flag = partial(beside, "tutorial"), partial(beside, "single_loop")
    steps, flash = (DECODE, GRAPH), _only("FLASH")
    return [
        *made,
        GpuArm("cudnn", "SDPA cuDNN", PARTS, sdpa, scope=_only("CUDNN")),
        GpuArm("flash", "SDPA flash", PARTS, sdpa, scope=flash),
        GpuArm("efficient", "SDPA efficient", PARTS, sdpa, scope=_only("EFFICIENT")),
        GpuArm("folded", "SDPA folded", steps, folded, scope=flash),
        GpuArm("flex", "FlexAttention", (FORWARD, BACKWARD, DECODE), flex, "shape", 120.0, last_tier=2),
        GpuArm("tutorial", "Triton tutorial's algorithm", (FORWARD, HOST), tutorial, "kernel", 120.0),
        GpuArm("flag", "FlagAttention's algorithm", (FORWARD,), flag, "kernel"),
        GpuArm("sage", "SageAttention", (FORWARD,), sage, "kernel", loosened=8.0),
        GpuArm("math", "SDPA math", PARTS, sdpa, scope=_only("MATH")),
    ]


DEFAULT = ("polyflash", "cudnn", "flash", "efficient", "folded", "flex", "tutorial", "flag", "sage")


def fields(text: str) -> tuple[tuple[str, Any], ...]:
    """ "a=1,b=true,c=descriptor" as names and values."""
    plain = {"true": True, "false": False}
    pairs = (part.partition("=")[::2] for part in text.split(","))
    return tuple(
        (name.strip(), plain.get(value.lower(), int(value) if value.isdigit() else value))
        for name, value in pairs
    )


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
