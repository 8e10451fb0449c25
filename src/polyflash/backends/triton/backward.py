"""Attention gradients in Triton: weights recomputed from lse, dK/dV and dQ in two kernels without atomics.

    delta = Σ_d do·out - dlse                                    `center`, one value per row

    dkv: a program owns BLOCK_N keys                             dq: a program owns BLOCK_M rows
    for m in row_range(i_n):                                     for n in block_range(i_m):
        pᵀ = exp(kqᵀ - lse)          [BLOCK_N, BLOCK_M]              p = exp(qkᵀ - lse)    [BLOCK_M, BLOCK_N]
        dv += dropped(pᵀ) @ do       [BLOCK_N, head_dim_v]
        dsᵀ = pᵀ·(dropped(v doᵀ) - delta)                            ds = p·(dropped(do vᵀ) - delta)
        dk += dsᵀ @ q                [BLOCK_N, head_dim]             dq += ds @ k          [BLOCK_M, head_dim]
    dk·scale                                                     dq·scale

ds is multiplied by 1 - tanh² under a softcap. With PACK the query heads of a key/value head are rows of one
tile in both kernels, so dk and dv of a group are summed in float32 where they are made. Every sum has a fixed
order: bits repeat. `fused` is one pass, dQ by atomic sums, for comparison only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash.backends.gpu.launch import tile_count
from polyflash.backends.gpu.numbers import Flags, Numbers, flags_of, numbers_of
from polyflash.backends.gpu.views import element_masked, operands_of, reachable, rows_of, view_of
from polyflash.backends.triton import bias_gradient, replay, runtime
from polyflash.backends.triton.config_types import product_of
from polyflash.backends.triton.constants import Constants
from polyflash.backends.triton.gradient_kernels import PAD, center, make_again, make_dkv, make_dq, part_width
from polyflash.backends.triton.tiles import channel_blocks, check_stages, least_channels
from polyflash.operands import differentiable
from polyflash.results import empty_in_order_of, gradient_kinds

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.triton.config_types import BackwardConfig
    from polyflash.plan import Launch
    from polyflash.spec import Arguments

CENTERED_ROWS = 32  # of a program of `center`


class Tensors(NamedTuple):
    """`t` of the gradient kernels. In "bf16x6" q, k, v and dout are their parts."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any  # with `delta` as `center` wrote them
    delta: Any
    x: Any
    nonfinite: Any
    group: Any
    num_heads: Any  # that the grid runs over
    visits: Any = None
    dq: Any = None  # None: not asked for
    dk: Any = None
    dv: Any = None
    dq_sum: Any = None
    dbias: Any = None
    end: Any = None  # see `runtime.compile`


class Centered(NamedTuple):
    """`t` of `center`."""

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any
    lse: Any
    dlse: Any
    row_lse: Any
    delta: Any
    nonfinite: Any
    q_parts: Any
    k_parts: Any
    v_parts: Any
    dout_parts: Any
    kv_lens: Any
    num_heads: Any
    group: Any
    end: Any = None  # see `runtime.compile`


class Cut(NamedTuple):
    """`n` of `center`."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    row_tiles: int
    key_tiles: int


class Form(NamedTuple):
    """A kernel's constants, and what its compiler is told beside them."""

    block: int  # keys or rows that a program owns
    finite: bool
    c: Constants  # as constexprs
    options: dict[str, Any]


class Forms(NamedTuple):
    """Forms of each kernel: for finite operands and, unless it has a loop for them, for others."""

    dkv: tuple[Form, ...]
    dv: tuple[Form, ...]  # of a pass of its own, if it has one
    dq: tuple[Form, ...]


class Prepared:
    """A route's memory between calls: its kernels, and for each set of flags the constants they have. With
    `rare`, the config of another engine's launch, of the forms alone for operands that are not finite."""

    __slots__ = ("config", "constants", "cores", "gradients", "kernels", "least", "product", "rare")

    def __init__(self, launch: Launch, rare: BackwardConfig | None = None) -> None:
        self.config: BackwardConfig = rare or launch.config
        self.rare = rare is not None
        self.cores = max(1, launch.target.cores)
        self.product = product_of(self.config, launch.spec, launch.target)
        self.least = least_channels(launch.target, max(self.config.block_n, self.config.dq_block_m))
        check_stages(launch.target, self.config.num_stages, self.config.dq_num_stages)
        self.kernels = runtime.Kernels()
        self.gradients = replay.Calls()
        self.constants: dict[Any, Any] = {}

    def forms(self, flags: Flags, head_dim: int, head_dim_v: int, pack: bool, masked: bool) -> Forms:
        key = (flags, pack, masked)
        found: Forms | None = self.constants.get(key)
        if found is None:
            c = self.config
            blocks = channel_blocks(head_dim, head_dim_v, self.least, self.least)
            both = Constants(**blocks, **flags._asdict(), PACK=pack, BASE2=c.base2)
            both = both._replace(PRODUCT=self.product, ALWAYS_MASKED=masked)
            dkv = both._replace(BLOCK_M=c.block_m, BLOCK_N=c.block_n, NUM_STAGES=c.num_stages)
            dq = both._replace(BLOCK_M=c.dq_block_m, BLOCK_N=c.dq_block_n, NUM_STAGES=c.dq_num_stages)
            dq = dq._replace(HEAVY_FIRST=flags.HAS_RIGHT)  # rows that see the most keys first
            # in parts, sums over other blocks would have other bits
            rare = {"BLOCK_M": 16, "BLOCK_N": 32} if self.product == "ieee" else {}
            wide = dkv._replace(BLOCK_N=c.apart * c.block_n)
            found = Forms(
                _forms("BLOCK_N", dkv, c.num_warps, rare),
                _forms("BLOCK_N", wide, c.apart * c.num_warps, rare) if c.apart else (),
                _forms("BLOCK_M", dq, c.dq_num_warps, rare if self.product == "bf16x6" else None),
            )
            if self.rare:
                found = Forms(*(forms[1:] for forms in found))
            self.constants[key] = found
        return found


def _forms(owned: str, tile: Constants, num_warps: int, rare: dict[str, Any] | None) -> tuple[Form, ...]:
    """Makes the form for finite operands and, with the changes `rare`, the one for others."""
    tiles = (tile,) if rare is None else (tile, tile._replace(FINITE=False, **rare))
    # scores are rounded as in the forward, see `recompute`
    options = {"num_warps": num_warps, "num_stages": tile.NUM_STAGES, "enable_fp_fusion": False}
    return tuple(Form(getattr(c, owned), c.FINITE, runtime.compiled_in(c), options) for c in tiles)


class Call(NamedTuple):
    """Operands that every kernel of one call reads."""

    prepared: Prepared
    t: tuple[Any, ...]  # what all have of `Tensors`
    n: Numbers
    flags: Flags
    forms: Forms
    num_heads: int
    group: int
    packed: bool  # requests are, into one sequence: not PACK
    key: tuple[Any, ...]
    device: torch.device

    def _launch_all(
        self, kernel: Any, forms: tuple[Form, ...], positions: int, visits: Any = None, **results: Any
    ) -> None:
        """All forms of a kernel over so many keys or rows: what `center` found decides on the device which
        one does anything."""
        num_heads = self.num_heads // self.group
        for block, finite, *how in forms:
            num_tiles, requests = tile_count(positions, block, self.n.batch, self.packed)
            total = num_tiles * num_heads * requests
            programs = total if finite else min(total, self.prepared.cores)
            n = Numbers(*self.n[:3], num_tiles, None, None, total, *self.n[7:])
            self.launch(kernel, programs, n, how, num_heads, results, visits)

    def launch(
        self, kernel: Any, programs: int, n: Any, how: Any, num_heads: int, results: Any, visits: Any = None
    ) -> None:
        """`how`: constants and options. `results`: fields of `Tensors`, four-dimensional and fresh."""
        views, (c, options) = {name: view_of(x) for name, x in results.items()}, how
        kinds = *((name, v and v[1:]) for name, v in views.items()), visits is None
        key = kernel.__name__, id(c), num_heads, *self.key, *kinds, runtime.aligned(*results.values())
        t = Tensors(*self.t, num_heads, visits, **views)  # type: ignore[call-arg]
        self.prepared.kernels.launch(kernel, (programs,), (t, n, c), options, key, self.device)


def centers(
    prepared: Prepared, inputs: tuple[Tensor, ...], results: tuple[Any, ...], kv_lens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """Results of `center`: lse and delta by packed row, float32 (B, Hkv, Sq·G); an int32 that is not 0 if an
    operand has something that is not finite; and q, k, v and dout, or the parts that kernels read instead.
    `inputs` are q, k and v, `results` out, dout, lse and dlse."""
    (q, k, v), (out, dout, lse, dlse) = inputs, results
    (batch, num_heads, seqlen_q), num_kv_heads = lse.shape, k.shape[1]
    group = num_heads // num_kv_heads
    rows = batch, num_kv_heads, seqlen_q * group
    row_lse, delta = padded_rows(rows, lse.device), padded_rows(rows, lse.device)
    nonfinite = runtime.scratch((1,), lse.device, torch.int32, zero=True)
    row_tiles, key_tiles = -(-seqlen_q // CENTERED_ROWS), -(-k.shape[2] // CENTERED_ROWS)
    programs = (row_tiles * num_heads + key_tiles * num_kv_heads) * batch
    read = q, k, v, dout
    parts = tuple(map(empty_parts, read)) if prepared.product == "bf16x6" else None
    views = *map(view_of, (q, k, v, out, dout)), *map(rows_of, (lse, dlse, row_lse, delta))
    cut = map(view_of, parts or (None,) * 4)
    t = Centered(*views, nonfinite, *cut, kv_lens, num_heads, group)  # type: ignore[call-arg]
    n = Cut(batch, seqlen_q, k.shape[2], row_tiles, key_tiles)
    aligned = runtime.aligned(q, k, v, out, dout, lse, dlse, kv_lens)
    key = "center", *(x and x[1:] for x in views), num_heads, group, aligned, kv_lens is None
    c = prepared.constants.get("center")
    if c is None:
        blocks = channel_blocks(q.shape[3], v.shape[3])
        c = runtime.compiled_in(Constants(**blocks, BLOCK_M=CENTERED_ROWS))
        prepared.constants["center"] = c
    prepared.kernels.launch(center, (programs,), (t, n, c), {"num_warps": 4}, key, out.device)
    return row_lse, delta, nonfinite, parts or read


def padded_rows(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Memory for a float32 of each packed row, and behind the last one for those that a block may read."""
    number = math.prod(shape)
    return runtime.scratch((number + PAD.value,), device)[:number].view(shape)


def empty_parts(x: Tensor) -> Tensor:
    """Memory for the three bfloat16 parts of each value of a float32 tensor, side by side in each row."""
    shape = *x.shape[:3], 3 * part_width(x.shape[3])
    return torch.empty(shape, dtype=torch.bfloat16, device=x.device)


def launch_dkv(
    call: Call, dk: Tensor | None, dv: Tensor | None, dq_sum: Tensor | None = None, visits: Any = None
) -> None:
    """Launches `make_dkv`: once for all results, or once more for dv where it has forms of its own."""
    (k, *_), forms = call.t[1], call.forms
    alone, beside = (dv, None) if forms.dv else (None, dv)
    if not (dk is beside is dq_sum is None):
        call._launch_all(make_dkv, forms.dkv, k.shape[2], visits, dk=dk, dv=beside, dq_sum=dq_sum)
    if alone is not None:
        call._launch_all(make_dkv, forms.dv, k.shape[2], dv=alone)


def launch_dq(call: Call, dq: Tensor, visits: Tensor | None = None) -> None:
    call._launch_all(make_dq, call.forms.dq, dq.shape[2] * call.group, visits, dq=dq)


def launch_again(call: Call, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Launches `make_again`, of the rare form, over as many tiles as keys or rows have."""
    block, c = call.forms.dkv[0].block, call.forms.dkv[0].c
    rows = -(-dq.shape[2] * call.group // getattr(c.BLOCK_M, "value", c.BLOCK_M))
    call._launch_all(make_again, call.forms.dkv, max(dk.shape[2], rows * block), dq=dq, dk=dk, dv=dv)


def prepare_call(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, centered: tuple[Any, ...], args: Arguments
) -> Call:
    """`centered` as `centers` returns it."""
    row_lse, delta, nonfinite, read = centered
    flags, x = flags_of(q, args), operands_of(args, k)
    n = numbers_of(q, k, args)
    group = q.shape[1] // k.shape[1]
    views = *map(view_of, read), *map(rows_of, (row_lse, delta))
    key = *(w[1:] for w in views), group, runtime.aligned(*read), runtime.signature(x)
    return Call(
        prepared=prepared,
        t=(*views, x, nonfinite, group),
        n=n,
        flags=flags,
        forms=prepared.forms(flags, q.shape[3], v.shape[3], group > 1, element_masked(args)),
        num_heads=q.shape[1],
        group=group,
        packed=args.cu_seqlens_q is not None,
        key=key,
        device=q.device,
    )


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The sinks' own weights times -delta, summed over batch entries and rows; nothing of rows that saw
    neither key nor sink."""
    delta = delta.unflatten(2, (lse.shape[2], -1)).transpose(2, 3).flatten(1, 2)
    weights = torch.exp(sinks.float()[None, :, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return -(weights * delta).sum((0, 2))


def run(
    launch: Launch,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: Arguments,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv, dbias, dsinks, each with its operand's shape and the dtype of `gradient_kinds`; None where
    `needs` is False."""
    prepared: Prepared | None = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
        launch.again = prepared.gradients.again
    q, k, v, out, dout = reachable(q, k, v, out, dout)
    given = q, k, v, out, dout, lse, dlse
    need_bias, need_sinks = needs[3] and args.bias is not None, needs[4] and args.sinks is not None
    if not (need_bias or need_sinks or prepared.config.fused or args.dropout_p):  # kernels alone, no torch
        make = lambda: differentiate(prepared, given, args, needs)[0]  # noqa: E731
        return *prepared.gradients(given, args, make, needs), None, None
    made, delta, call = differentiate(prepared, given, args, needs)
    dbias = dsinks = None
    if need_bias and args.bias is not None:
        dbias = bias_gradient.run(call, q, k, v, args.bias)
    if need_sinks and args.sinks is not None:
        kinds = gradient_kinds(differentiable(q, k, v, args), args)
        dsinks = sink_gradient(args.sinks, lse, delta).to(kinds[-1])
    return *made, dbias, dsinks


def differentiate(
    prepared: Prepared, given: tuple[Any, ...], args: Arguments, needs: Sequence[bool]
) -> tuple[tuple[Tensor | None, Tensor | None, Tensor | None], Tensor, Call]:
    """dq, dk and dv of q, k, v, out, dout, lse and dlse, as `needs` says, delta by packed row, the call."""
    (q, k, v), results = given[:3], given[3:]
    kv_lens = None if args.cu_seqlens_q is not None else operands_of(args, k).kv_lens
    centered = centers(prepared, (q, k, v), results, kv_lens)
    call = prepare_call(prepared, q, k, v, centered, args)
    kinds = gradient_kinds(differentiable(q, k, v, args), args)
    dq, dk, dv = (
        empty_in_order_of(x, x.shape[3], kind) if need else None
        for x, kind, need in zip((q, k, v), kinds[:3], needs[:3], strict=True)
    )
    fused = prepared.config.fused and dq is not None
    dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if fused else None
    if dk is not None or dv is not None or fused:
        launch_dkv(call, dk, dv, dq_sum)
    if dq_sum is not None and dq is not None:
        dq.copy_(dq_sum.mul_(call.n.scale))
    elif dq is not None:
        launch_dq(call, dq)
    return (dq, dk, dv), centered[1], call
