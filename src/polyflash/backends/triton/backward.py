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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash.backends.triton import arguments, bias_gradient, runtime
from polyflash.backends.triton.config_types import product_of
from polyflash.backends.triton.forward import element_masked
from polyflash.backends.triton.gradient_kernels import center, make_dkv, make_dq
from polyflash.backends.triton.tiles import LEAST, check_stages, least_channels, split_dim
from polyflash.results import empty_in_order_of

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.triton.config_types import BackwardConfig
    from polyflash.plan import Launch
    from polyflash.spec import Arguments

CENTERED_ROWS = 32  # of a program of `center`
PAD = 256  # rows that a block may reach beyond the last one


class Prepared:
    """What a route keeps between calls: its kernels, and for each set of flags the constants they have."""

    __slots__ = ("bias_constants", "config", "constants", "cores", "kernels", "least", "product")

    def __init__(self, launch: Launch) -> None:
        self.config: BackwardConfig = launch.config
        self.cores = max(1, launch.target.cores)
        self.product = product_of(launch.config, launch.spec, launch.target)
        self.least = least_channels(launch.target, max(self.config.block_n, self.config.dq_block_m))
        check_stages(launch.target, self.config.num_stages, self.config.dq_num_stages)
        self.kernels = runtime.Kernels()
        self.constants: dict[Any, tuple[dict[str, Any], ...]] = {}
        self.bias_constants: dict[Any, dict[str, Any]] = {}

    def constants_for(
        self, flags: arguments.Flags, head_dim: int, head_dim_v: int, packed: bool, masked: bool
    ) -> tuple[dict[str, Any], ...]:
        """Constexprs and options of `make_dkv`, of `make_dkv` for what is not finite, and of `make_dq`."""
        key = (flags, packed, masked)
        found = self.constants.get(key)
        if found is None:
            c = self.config
            both = {
                **channels(head_dim, head_dim_v, self.least), "PACK": packed, **flags._asdict(),
                "BASE2": c.base2, "PRODUCT": self.product, "ALWAYS_MASKED": masked,
                "enable_fp_fusion": False,  # scores are rounded as in the forward, see `recompute`
            }  # fmt: skip
            del both["NEGATIVE"]
            tiles_of = (
                (c.block_m, c.block_n, c.num_stages, c.num_warps),
                (c.dq_block_m, c.dq_block_n, c.dq_num_stages, c.dq_num_warps),
            )
            dkv, dq = (
                {**both, "BLOCK_M": m, "BLOCK_N": n, "NUM_STAGES": s, "num_stages": s, "num_warps": w}
                for m, n, s, w in tiles_of
            )
            rare = {**dkv, "FINITE": False}
            if self.product == "ieee":  # in parts, sums of other blocks would have other bits
                rare |= {"BLOCK_M": 16, "BLOCK_N": 32}
            found = self.constants[key] = {**dkv, "FINITE": True}, rare, dq
        return found


def channels(head_dim: int, head_dim_v: int, least: int) -> dict[str, int]:
    """The head dims and their blocks, the first of `least` channels or more, as every kernel names them."""
    (d0, d1), (dv0, dv1) = split_dim(head_dim, least), split_dim(head_dim_v, least)
    return {"D": head_dim, "D0": d0, "D1": d1, "DV": head_dim_v, "DV0": dv0, "DV1": dv1}


class Call(NamedTuple):
    """What every kernel of one call reads."""

    prepared: Prepared
    views: tuple[Any, ...]  # q, k, v, dout, lse, delta
    x: arguments.Operands
    n: arguments.Scalars
    flags: arguments.Flags
    num_heads: int
    group: int
    masked: bool
    key: tuple[Any, ...]
    device: torch.device

    def numbers(self) -> tuple[Any, ...]:
        """The scalars behind the sizes, in the order of every kernel."""
        n = self.n
        return (
            n.offset, n.left, n.right, n.scale, n.softcap, n.seed_lo, n.seed_hi, n.drop_below,
            n.keep_scale,
        )  # fmt: skip

    def launch(
        self, kernel: Any, programs: int, results: tuple[Tensor | None, ...], rest: tuple[Any, ...],
        sizes: tuple[int, ...], constants: Any,
    ) -> None:  # fmt: skip
        """`results` follow the views that every kernel has, four-dimensional and fresh; `rest` is what stands
        between them and the sizes."""
        views = tuple(None if r is None else arguments.view(r) for r in results)
        key = (
            kernel.__name__, id(constants), *self.key, *(v and v[1:] for v in views), rest[-1] is None,
            runtime.aligned(*results),
        )  # fmt: skip
        everything = (*self.views, *views, *rest, *sizes, *self.numbers())
        self.prepared.kernels.launch(kernel, (programs,), everything, constants, key, self.device)


def tile_count(rows: int, block: int, n: arguments.Scalars, packed: bool) -> tuple[int, int]:
    """Tiles of `rows` positions and requests that each have as many. Packed members find their own tiles;
    one more is for what belongs to nobody."""
    return (rows // block + n.batch + 1, 1) if packed else (-(-rows // block), n.batch)


def centers(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
    dlse: Tensor | None, kv_lens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """lse and delta by packed row, float32 (B, Hkv, Sq·G), and an int32 that is not 0 if an operand has
    something that is not finite."""
    (batch, num_heads, seqlen_q), num_kv_heads = lse.shape, k.shape[1]
    group, number = num_heads // num_kv_heads, lse.numel()
    room = torch.empty((2, -(-number // PAD) * PAD + PAD), dtype=torch.float32, device=lse.device)
    row_lse, delta = room[:, :number].view(2, batch, num_kv_heads, seqlen_q * group).unbind()
    odd = torch.zeros(1, dtype=torch.int32, device=lse.device)
    row_tiles, key_tiles = -(-seqlen_q // CENTERED_ROWS), -(-k.shape[2] // CENTERED_ROWS)
    programs = (row_tiles * num_heads + key_tiles * num_kv_heads) * batch
    views = (
        *map(arguments.view, (q, k, v, out, dout)), arguments.rows(lse),
        None if dlse is None else arguments.rows(dlse), arguments.rows(row_lse), arguments.rows(delta),
    )  # fmt: skip
    constants = {
        **channels(q.shape[3], v.shape[3], LEAST),
        "BLOCK_M": CENTERED_ROWS,
        "PAD": PAD,
        "num_warps": 4,
    }
    key = (
        "center", *(x and x[1:] for x in views), num_heads, group,
        runtime.aligned(q, k, v, out, dout, lse, dlse, kv_lens), kv_lens is None,
    )  # fmt: skip
    everything = (
        *views, odd, kv_lens, batch, num_heads, group, seqlen_q, k.shape[2], row_tiles, key_tiles
    )  # fmt: skip
    prepared.kernels.launch(center, (programs,), everything, constants, key, out.device)
    return row_lse, delta, odd


def launch_dkv(
    call: Call, odd: Tensor, k: Tensor, v: Tensor, dk: Tensor | None, dv: Tensor | None,
    dq_sum: Tensor | None = None, visits: Tensor | None = None,
) -> None:  # fmt: skip
    """Both forms of `make_dkv`: what `center` found decides on the device which one does anything."""
    *forms, _ = call.prepared.constants_for(call.flags, k.shape[3], v.shape[3], call.group > 1, call.masked)
    for constants in forms:
        num_tiles, requests = tile_count(
            k.shape[2], constants["BLOCK_N"], call.n, call.x.cu_seqlens_k is not None
        )
        total = num_tiles * k.shape[1] * requests
        programs = total if constants["FINITE"] else min(total, call.prepared.cores)
        sizes = (call.n.batch, k.shape[1], call.group, call.n.seqlen_q, call.n.seqlen_k, num_tiles, total)
        call.launch(make_dkv, programs, (dk, dv, dq_sum), (odd, call.x, visits), sizes, constants)


def launch_dq(call: Call, odd: Tensor, v: Tensor, dq: Tensor, visits: Tensor | None = None) -> None:
    packed = call.group > 1
    *_, constants = call.prepared.constants_for(call.flags, dq.shape[3], v.shape[3], packed, call.masked)
    num_heads = call.num_heads // call.group
    num_tiles, requests = tile_count(
        dq.shape[2] * call.group, constants["BLOCK_M"], call.n, call.x.cu_seqlens_q is not None
    )
    total = num_tiles * num_heads * requests
    sizes = (call.n.batch, num_heads, call.group, call.n.seqlen_q, call.n.seqlen_k, num_tiles, total)
    call.launch(make_dq, total, (dq,), (odd, call.x, visits), sizes, constants)


def prepare_call(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, row_lse: Tensor, delta: Tensor,
    args: Arguments,
) -> Call:  # fmt: skip
    """`row_lse` and `delta` as `centers` returns them."""
    flags, x = arguments.flags(q, args), arguments.operands(args, k)
    n = arguments.scalars(q, k, args)
    views = (*map(arguments.view, (q, k, v, dout)), arguments.rows(row_lse), arguments.rows(delta))
    group = q.shape[1] // k.shape[1]
    key = (
        *(w[1:] for w in views), q.shape[1], group, runtime.aligned(q, k, v, dout),
        runtime.signature(x),
    )  # fmt: skip
    masked = element_masked(args)
    return Call(prepared, views, x, n, flags, q.shape[1], group, masked, key, q.device)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The sinks' own weights times -delta, summed over batch entries and rows; nothing of rows that saw
    neither key nor sink."""
    delta = delta.unflatten(2, (lse.shape[2], -1)).transpose(2, 3).flatten(1, 2)
    weights = torch.exp(sinks.float()[None, :, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return -(weights * delta).sum((0, 2))


def run(
    launch: Launch, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, args: Arguments, needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dq, dk, dv, dbias, dsinks, each with its operand's shape and dtype; None where `needs` is False."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
    q, k, v, out, dout = arguments.reachable(q, k, v, out, dout)
    if prepared.product == "bf16x6":  # Triton 3.6 compiles `make_dkv` wrongly for channels that lie apart
        q, k, v, dout = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v, dout))
    need_bias, need_sinks = needs[3] and args.bias is not None, needs[4] and args.sinks is not None
    kv_lens = None if args.cu_seqlens_q is not None else arguments.operands(args, k).kv_lens
    row_lse, delta, odd = centers(prepared, q, k, v, out, dout, lse, dlse, kv_lens)
    call = prepare_call(prepared, q, k, v, dout, row_lse, delta, args)
    dq, dk, dv = (
        empty_in_order_of(x, x.shape[3]) if need else None
        for x, need in zip((q, k, v), needs[:3], strict=True)
    )
    fused = prepared.config.fused and dq is not None
    dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if fused else None
    if dk is not None or dv is not None or fused:
        launch_dkv(call, odd, k, v, dk, dv, dq_sum)
    if dq_sum is not None and dq is not None:
        dq.copy_(dq_sum.mul_(call.n.scale))
    elif dq is not None:
        launch_dq(call, odd, v, dq)
    dbias = dsinks = None
    if need_bias and args.bias is not None:
        dbias = bias_gradient.run(call, q, k, v, args.bias)
    if need_sinks and args.sinks is not None:
        dsinks = sink_gradient(args.sinks, lse, delta).to(args.sinks.dtype)
    return dq, dk, dv, dbias, dsinks
