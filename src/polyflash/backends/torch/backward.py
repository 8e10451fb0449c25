"""Backward pass in tiled eager torch ops: explicit gradients, weights recomputed from lse.

    p = exp(s - lse)     delta = Σ_d do·out - dlse     dp = do·vᵀ, dropped like p     ds = p·(dp - delta)
    dv = Σ_i dropped(p)ᵀ·do     dbias = Σ ds     ds' = ds·(1 - tanh²) if soft-capped
    dq = scale·Σ_j ds'·k        dk = scale·Σ_i ds'ᵀ·q        dsinks = -Σ_i exp(sink - lse)·delta

Query heads that share a key/value head are rows of one product, so dk and dv of a group are summed in it.
One pass over tiles in a fixed order, no atomics: bitwise repeatable. Accumulators are float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polyflash.backends.torch.configs import Config
from polyflash.backends.torch.forward import (
    Part,
    apply_mask,
    batches,
    drop,
    finite,
    key_tiles,
    load_tile,
    lse_tile,
    nonfinite_sum,
    row_tiles,
    score_tile,
    store_rows,
)
from polyflash.results import gradient_kinds
from polyflash.spec import Arguments

if TYPE_CHECKING:
    from polyflash.plan import Launch

Needs = tuple[bool, bool, bool, bool, bool]  # dq, dk, dv, dbias, dsinks


class Given(NamedTuple):
    """Results of the forward for each row, and their gradients."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor

    def of(self, rows: Callable[[Tensor], Tensor]) -> Given:
        return Given(*(None if x is None else rows(x) for x in self))  # type: ignore[arg-type]


@dataclass(slots=True)
class Gradients:
    """Sums in progress, None where one was not asked for. dq is finished tile by tile."""

    dq: Tensor | None  # in the dtype that is returned
    dk: Tensor | None  # accumulation dtype, k's shape
    dv: Tensor | None
    dbias: Tensor | None  # the shape of the bias as given
    dsinks: Tensor | None  # (Hkv, G)


@dataclass(slots=True)
class Rows:
    """Values that one query tile brings to every key tile; (b, Hkv, G·rows, ·) and (b, Hkv, G, rows, 1)."""

    i0: int
    rows: int
    b_q: Tensor
    b_do: Tensor
    lse: Tensor  # +inf for rows that saw no key, so that their weights are exactly 0
    delta: Tensor


def load_rows(part: Part, given: Given, i0: int, rows: int) -> Rows:
    """Tiles of a query block with its delta; zero gradients for rows that saw no key."""
    dout, dlse, out, lse = given
    b_lse, empty = lse_tile(part, lse, i0, rows)
    b_do = load_tile(part.of(dout), i0, rows, part.kind).masked_fill(empty, 0.0)
    delta = (b_do * load_tile(part.of(out), i0, rows, part.kind)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - load_tile(part.of(dlse.unsqueeze(-1)), i0, rows, part.kind)
    return Rows(
        i0,
        rows,
        load_tile(part.q, i0, rows, part.kind).flatten(2, 3),
        b_do.flatten(2, 3),
        b_lse,
        delta.masked_fill(empty, 0.0),
    )


def add_keys(total: Tensor, tile: Tensor, j0: int) -> None:
    """Adds a (b, Hkv, keys, C) tile at key j0; keys outside are dropped."""
    n = min(tile.shape[2], total.shape[2] - j0)
    total[:, :, j0 : j0 + n] += tile[:, :, :n]


def add_bias(total: Tensor, b_ds: Tensor, i0: int, j0: int) -> None:
    """Adds a score gradient to a bias gradient (b | 1, Hkv | 1, G | 1, Sq | 1, Sk | 1), summed where
    it broadcasts."""
    broadcast = [d for d in range(5) if total.shape[d] == 1 and b_ds.shape[d] != 1]
    b_ds = b_ds.sum(broadcast, keepdim=True) if broadcast else b_ds
    for dim, start in ((3, i0), (4, j0)):
        if total.shape[dim] > 1:
            lo, hi = max(start, 0), min(start + b_ds.shape[dim], total.shape[dim])
            total, b_ds = total.narrow(dim, lo, hi - lo), b_ds.narrow(dim, lo - start, hi - lo)
    total += b_ds


def dv_tile(part: Part, r: Rows, b_p: Tensor, visible: Tensor | None) -> Tensor:
    """Σ_i pᵀ·do of one key tile, (b, Hkv, keys, Dv)."""
    b_pt = b_p.flatten(2, 3).mT
    if visible is None:
        return b_pt @ r.b_do
    turned = visible.expand(b_p.shape).flatten(2, 3).mT.unsqueeze(2)
    odd = nonfinite_sum(turned, r.b_do, 1, b_p.shape[-1])
    return b_pt @ r.b_do if odd is None else torch.where(odd == 0.0, b_pt @ finite(r.b_do), odd)


def differentiate(part: Part, r: Rows, totals: Gradients, j0: int, keys: int, dq: Tensor | None) -> None:
    """One tile: adds its share to every gradient that was asked for."""
    b_k, b_v = load_tile(part.k, j0, keys, part.kind), load_tile(part.v, j0, keys, part.kind)
    b_s, visible, b_cap = score_tile(part, r.b_q, b_k, r.i0, r.rows, j0, keys)
    b_p = apply_mask(b_s.sub_(r.lse).exp_(), visible, 0.0)
    if totals.dv is not None:
        add_keys(totals.dv, dv_tile(part, r, drop(part, b_p, r.i0, j0), visible), j0)
    if dq is None and totals.dk is None and totals.dbias is None:
        return
    b_dp = drop(part, (r.b_do @ b_v.mT).unflatten(2, (part.group, r.rows)), r.i0, j0)
    b_ds = apply_mask(b_dp.sub_(r.delta).mul_(b_p), visible, 0.0)
    if totals.dbias is not None and part.bias is not None:
        add_bias(_like_bias(part, totals.dbias), b_ds, r.i0, j0)
    if b_cap is not None:
        b_ds = apply_mask(b_ds * (1.0 - b_cap * b_cap), visible, 0.0)
    b_ds = b_ds.flatten(2, 3)
    if dq is not None:
        dq += b_ds @ (b_k if visible is None else finite(b_k))
    if totals.dk is not None:
        add_keys(totals.dk, b_ds.mT @ (r.b_q if visible is None else finite(r.b_q)), j0)


def _like_bias(part: Part, dbias: Tensor) -> Tensor:
    """This part's view of the bias gradient, in the 5 dimensions of `part.bias`."""
    x = dbias[(None,) * (4 - dbias.ndim)]
    x = x.unsqueeze(2) if x.shape[1] == 1 else x.unflatten(1, (-1, part.group))
    return x if x.shape[0] == 1 else x[part.first : part.first + part.entries]


def add_sinks(part: Part, r: Rows, dsinks: Tensor) -> None:
    """The sink's own weight times -delta, summed over batch entries and rows."""
    if part.sinks is not None:
        share = torch.exp(part.sinks - r.lse) * r.delta
        dsinks -= share.sum((0, 3, 4))


def accumulate(part: Part, given: Given, totals: Gradients, config: Config) -> None:
    """All tiles of one part."""
    key_work = any(x is not None for x in (totals.dq, totals.dk, totals.dv, totals.dbias))
    for i0, rows in row_tiles(part, config):
        r = load_rows(part, given, i0, rows)
        if totals.dsinks is not None:
            add_sinks(part, r, totals.dsinks)
        if not key_work:
            continue
        dq = None if totals.dq is None else torch.zeros_like(r.b_q)
        for j0, keys in key_tiles(part, i0, rows, config):
            differentiate(part, r, totals, j0, keys, dq)
        if dq is not None and totals.dq is not None:
            store_rows(part.of(totals.dq), (dq * part.scale).unflatten(2, (part.group, rows)), i0)
    if totals.dk is not None:
        totals.dk *= part.scale


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
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv, dbias, dsinks, each with its operand's shape and the dtype of `gradient_kinds`; None where
    `needs` is False."""
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    with torch.no_grad():
        packed, likes = args.cu_seqlens_q is not None, (q, k, v, args.bias, args.sinks)
        kinds = gradient_kinds(likes, args)
        dq = (torch.zeros_like if packed else torch.empty_like)(q, dtype=kinds[0]) if needs[0] else None
        heads = (k.shape[1], q.shape[1] // k.shape[1])
        dsinks = q.new_zeros(heads, dtype=kind) if needs[4] and args.sinks is not None else None
        dk, dv, dbias = (
            torch.zeros(x.shape, dtype=kind, device=q.device) if need and x is not None else None
            for x, need in zip((k, v, args.bias), needs[1:4], strict=True)
        )
        given = Given(dout, dlse, out, lse)
        for part, rows, keys in batches(q, k, v, args, launch.config):  # what is in none keeps its zeros
            own = slice(part.first, part.first + part.entries)
            own_k, own_v = (None if x is None else keys(x)[own] for x in (dk, dv))
            of_part = Gradients(None if dq is None else rows(dq), own_k, own_v, dbias, dsinks)
            accumulate(part, given.of(rows), of_part, launch.config)
    made = zip((dq, dk, dv, dbias, dsinks), likes, kinds, strict=True)
    return tuple(None if x is None else x.to(kind).reshape(like.shape) for x, like, kind in made)  # type: ignore
