"""Forward pass in tiled eager torch ops: every feature, any device, any strides, memory of a few score tiles.

    s = scale·q·k; softcap; + bias + ALiBi; mask          tile (b, Hkv, G, rows, keys)
    m' = max(m, max_j s)     p = exp(s - m')     l' = l·exp(m - m') + Σ_j p     acc' = acc·exp(m - m') + p·v
    out = acc / l            lse = m + ln l      a sink starts the row with m = sink, l = 1

q is read as (B, Hkv, G, Sq, D): the G query heads of one key/value head are rows of one tile, so K and V are
never expanded. Tiles are raised to float32 (float64 stays); products, statistics and accumulators stay there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyflash import mask as masks
from polyflash.backends.torch import handover
from polyflash.backends.torch.configs import Config
from polyflash.backends.torch.intervals import listed, lists_of, touches
from polyflash.backends.torch.packed import runs
from polyflash.backends.torch.paged import Pages
from polyflash.backends.torch.philox import kept
from polyflash.results import converted
from polyflash.spec import Arguments

if TYPE_CHECKING:
    from polyflash.plan import Launch

_INF = float("inf")
_ALIGNED = 64  # bytes, as torch allocates
_SOFTCAPS = (1e-30, 1e30)  # beyond, float32 loses the quotient or the product


@dataclass(slots=True)
class Part:
    """The batch entries [first, first + entries) of a call, as views: what every tile of them reads."""

    args: Arguments
    first: int
    entries: int
    group: int
    num_q_heads: int
    q: Tensor  # (b, Hkv, G, Sq, D)
    k: Tensor | Pages  # (b, Hkv, Sk, D)
    v: Tensor | Pages  # (b, Hkv, Sk, Dv)
    kind: torch.dtype  # of scores, statistics and accumulators
    scale: float
    kv_start: int | Tensor  # ints, or (b, 1, 1, 1, 1) where reading them would synchronise
    kv_len: int | Tensor
    offset: int | Tensor
    mask: Tensor | None  # (b | 1, Hkv | 1, G | 1, Sq | 1, Sk | 1)
    bias: Tensor | None
    slopes: Tensor | None  # (b | 1, Hkv, G, 1, 1)
    sinks: Tensor | None  # (1, Hkv, G, 1, 1)
    # (b | 1, Hkv | 1, G | 1, row blocks, intervals, 2), and the rows of a block: interval lists, and bounds
    # of rows, which are lists of blocks of one row.
    lists: list[tuple[Tensor, int]]
    planes: Tensor | None  # (b, Hkv, G): head + num_q_heads·batch, for dropout

    def of(self, x: Tensor) -> Tensor:
        """This part of a (B, Hq, ...) tensor, as (b, Hkv, G, ...)."""
        return x[self.first : self.first + self.entries].unflatten(1, (-1, self.group))


class Scores(NamedTuple):
    """One tile of scores: -inf where invisible; `visible` None means all of it."""

    s: Tensor
    visible: Tensor | None
    cap: Tensor | None  # tanh(scale·q·k / softcap)


def parts(
    q: Tensor, k: Tensor | Pages, v: Tensor | Pages, args: Arguments, config: Config, *, first_batch: int = 0
) -> Iterator[Part]:
    """Cuts the batch so that a score tile stays within the config's bound, and to single entries where
    their bounds are known on the host or their bits must not depend on the others. `first_batch` is the
    index of entry 0 in dropout's counter."""
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    num_kv_heads, seqlen_k = k.shape[1], k.shape[2]
    group = num_q_heads // num_kv_heads
    tile = num_q_heads * min(seqlen_q, config.block_m) * min(seqlen_k, config.block_n)
    lengths = (args.kv_lens, args.kv_starts, args.q_offset)
    on_host = any(x is not None and x.device.type == "cpu" for x in lengths)
    step = 1 if on_host or args.batch_invariant else max(1, config.max_scores // max(1, tile))
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    mask, bias = (None if x is None else _grouped(x, num_kv_heads, group) for x in (args.mask, args.bias))
    lists = []
    if args.intervals is not None:
        lists.append((_grouped(args.intervals, num_kv_heads, group), args.interval_rows))
    if args.row_bounds is not None:
        lists.append((args.row_bounds[None, None, None, :, None], 1))
    slopes, sinks = (
        None if x is None else converted(x, kind).reshape(-1, num_kv_heads, group, 1, 1)
        for x in (args.alibi_slopes, args.sinks)
    )
    for b in range(0, batch, step):
        entries = min(step, batch - b)
        kv_len = _value(args.kv_lens, b, entries, seqlen_k)
        if isinstance(kv_len, Tensor):
            kv_len = kv_len.clamp(0, seqlen_k)
        offset = kv_len - seqlen_q if args.offset is None else args.offset
        planes = None
        if args.dropout_p:
            requests = torch.arange(first_batch + b, first_batch + b + entries, device=q.device)
            heads = torch.arange(args.dropout_head, args.dropout_head + num_q_heads, device=q.device)
            planes = requests[:, None] * (args.dropout_heads or num_q_heads) + heads
            planes = planes.unflatten(1, (num_kv_heads, group))
        yield Part(
            args=args,
            first=b,
            entries=entries,
            group=group,
            num_q_heads=num_q_heads,
            q=q[b : b + entries].unflatten(1, (num_kv_heads, group)),
            k=_keys(k, b, entries, kv_len),
            v=_keys(v, b, entries, kv_len),
            kind=kind,
            scale=1.0 / math.sqrt(head_dim) if args.scale is None else args.scale,
            kv_start=_value(args.kv_starts, b, entries, 0),
            kv_len=kv_len,
            offset=_value(args.q_offset, b, entries, offset),
            mask=_entries(mask, b, entries),
            bias=_entries(bias, b, entries),
            slopes=_entries(slopes, b, entries),
            sinks=sinks,
            lists=[(x if x.shape[0] == 1 else x[b : b + entries], n) for x, n in lists],
            planes=planes,
        )


Own = Callable[[Tensor], Tensor]


def batches(
    q: Tensor, k: Tensor, v: Tensor, args: Arguments, config: Config
) -> Iterator[tuple[Part, Own, Own]]:
    """The parts of a call; with each, how its batch is viewed in a tensor of rows, and in one of keys. A run
    of packed members is a batch."""
    table = args.page_table
    if args.cu_seqlens_q is None:
        keys, values = (x if table is None else Pages(x, table) for x in (k, v))
        for part in parts(q, keys, values, args, config):
            yield part, _whole, _whole
    for members in runs(args, q.shape[2], k.shape[2]):
        own = None if table is None else table[members.first :][: members.members]
        keys, values = (members.keys_of(x) if own is None else Pages(x, own) for x in (k, v))
        operands = members.rows_of(q), keys, values, members.arguments(args)
        for part in parts(*operands, config, first_batch=members.first):
            yield part, members.rows_of, members.keys_of


def _whole(x: Tensor) -> Tensor:
    return x


def _grouped(x: Tensor, num_kv_heads: int, group: int) -> Tensor:
    """A tensor that broadcasts to (B, Hq, Sq, Sk), or (B | 1, Hq | 1, ...), as a view with heads as (Hkv, G);
    not expanded."""
    x = x[(None,) * (4 - x.ndim)]
    return x.unsqueeze(2) if x.shape[1] == 1 else x.unflatten(1, (num_kv_heads, group))


def _entries(x: Tensor | None, first: int, entries: int) -> Tensor | None:
    return x if x is None or x.shape[0] == 1 else x[first : first + entries]


def _keys(x: Tensor | Pages, first: int, entries: int, kv_len: int | Tensor) -> Tensor | Pages:
    return x[first : first + entries] if isinstance(x, Tensor) else x.of(first, entries, kv_len)


def _value(x: Tensor | None, first: int, entries: int, default: int | Tensor) -> int | Tensor:
    if x is None:
        return default
    if x.device.type == "cpu":
        return int(x[first])
    return x[first : first + entries].long().view(-1, 1, 1, 1, 1)


def row_tiles(part: Part, config: Config) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each query tile. With batch_invariant, tiles are full and aligned to absolute
    positions: a row meets the same products in the same places however its request is cut. Zeros outside."""
    seqlen_q = part.q.shape[3]
    if not part.args.batch_invariant:
        for i0 in range(0, seqlen_q, config.block_m):
            yield i0, min(config.block_m, seqlen_q - i0)
        return
    first = -(part.offset % config.block_m) if isinstance(part.offset, int) else 0
    for i0 in range(first, seqlen_q, config.block_m):
        yield i0, config.block_m


def key_tiles(part: Part, i0: int, rows: int, config: Config) -> Iterator[tuple[int, int]]:
    """(first key, keys) of each key tile that rows i0.. visit. The last one ends with the live keys where
    they are known: bits depend on no padding behind them, and on no page."""
    seqlen_k = min(part.k.shape[2], part.kv_len) if isinstance(part.kv_len, int) else part.k.shape[2]
    n_lo, n_hi = block_range(part, i0, rows, config.block_n)
    lists = [lists_of(x, i0, rows, part.q.shape[3], n)[0] for x, n in part.lists]
    for j0 in range(n_lo * config.block_n, min(n_hi * config.block_n, seqlen_k), config.block_n):
        keys = min(config.block_n, seqlen_k - j0)
        if all(touches(x, j0, keys) for x in lists):
            yield j0, config.block_n if part.args.batch_invariant else keys


def load_tile(x: Tensor | Pages, start: int, size: int, kind: torch.dtype) -> Tensor:
    """Rows [start, start + size) of (..., seqlen, channels), raised to `kind`; zeros outside the tensor.
    Contiguous and aligned: a product's bits must depend on neither the strides nor the address of x."""
    if isinstance(x, Pages):
        return x.tile(start, size, kind)
    lo, hi = max(start, 0), min(start + size, x.shape[-2])
    tile = x[..., lo:hi, :].to(kind).contiguous()
    if hi - lo == size:
        return tile if tile.data_ptr() % _ALIGNED == 0 else tile.clone()
    return F.pad(tile, (0, 0, lo - start, start + size - hi))


def lse_tile(part: Part, lse: Tensor, i0: int, rows: int) -> tuple[Tensor, Tensor]:
    """(b, Hkv, G, rows, 1) of lse (B, Hq, Sq), and which of them are of empty rows or outside the tensor:
    those are +inf, which makes every weight 0."""
    own = part.of(lse)
    lo, hi = max(i0, 0), min(i0 + rows, own.shape[3])
    tile = F.pad(own[..., lo:hi].to(part.kind), (lo - i0, i0 + rows - hi), value=-_INF).unsqueeze(-1)
    empty = tile == -_INF
    return tile.masked_fill(empty, _INF), empty


def load_operand(x: Tensor, i0: int, rows: int, j0: int, keys: int) -> Tensor:
    """The part of a mask or bias that a tile reads; dimensions of size 1 broadcast."""
    for dim, start, size in ((-2, i0, rows), (-1, j0, keys)):
        n = x.shape[dim]
        if n == 1:
            continue
        lo, hi = max(start, 0), min(start + size, n)
        x = x.narrow(dim, lo, hi - lo)
        if hi - lo < size:
            x = F.pad(x, (0, 0) * (-1 - dim) + (lo - start, start + size - hi))
    return x


def block_range(part: Part, i0: int, rows: int, block_n: int) -> tuple[int, int]:
    """Key blocks [n_lo, n_hi) that these rows visit; a bound that lives on a device stays wide."""
    args, seqlen_k = part.args, part.k.shape[2]
    known = isinstance(part.offset, int)
    interval = partial(
        masks.row_interval,
        seqlen_k=part.kv_len if isinstance(part.kv_len, int) else seqlen_k,
        offset=part.offset if isinstance(part.offset, int) else 0,
        causal=args.causal and known,
        window=(args.window_left, args.window_right) if known else (None, None),
        kv_start=part.kv_start if isinstance(part.kv_start, int) else 0,
    )
    return masks.block_range(max(i0, 0), min(i0 + rows, part.q.shape[3]) - 1, block_n, interval)


def inside(part: Part, i0: int, rows: int, j0: int, keys: int) -> bool:
    """Says whether all rows of the tile see all its keys, as far as lengths, order and distance go."""
    if not (isinstance(part.kv_start, int) and isinstance(part.kv_len, int)):
        return False
    if not part.kv_start <= j0 <= j0 + keys <= part.kv_len:
        return False
    left, right = _sides(part.args)
    if left is None and right is None:
        return True
    if not isinstance(part.offset, int):
        return False
    first, last = max(i0, 0) + part.offset, min(i0 + rows, part.q.shape[3]) - 1 + part.offset
    return (right is None or j0 + keys - 1 <= first + right) and (left is None or j0 >= last - left)


def _sides(args: Arguments) -> tuple[int | None, int | None]:
    return args.window_left, 0 if args.causal else args.window_right


def positions(part: Part, i0: int, rows: int) -> Tensor:
    """Positions of a tile's rows among the keys: (rows, 1), or (b, 1, 1, rows, 1)."""
    return torch.arange(i0, i0 + rows, device=part.q.device)[:, None] + part.offset


def visible_pairs(part: Part, i0: int, rows: int, j0: int, keys: int) -> Tensor | None:
    """The element mask of a tile, broadcastable to (b, Hkv, G, rows, keys); None: every pair is visible."""
    args, seen = part.args, None
    if not inside(part, i0, rows, j0, keys):
        j = torch.arange(j0, j0 + keys, device=part.q.device)
        seen = (j >= part.kv_start) & (j < part.kv_len)
        left, right = _sides(args)
        if right is not None:
            seen = seen & (j <= positions(part, i0, rows) + right)
        if left is not None:
            seen = seen & (j >= positions(part, i0, rows) - left)
    if args.q_segments is not None and args.k_segments is not None:
        entries = slice(part.first, part.first + part.entries)
        q_ids = load_operand(args.q_segments[entries, None, None, :, None], i0, rows, 0, 1)
        k_ids = load_operand(args.k_segments[entries, None, None, None, :], 0, 1, j0, keys)
        seen = _both(seen, q_ids == k_ids)
    for lists, n in part.lists:
        seen = _both(seen, listed(lists, i0, rows, j0, keys, part.q.shape[3], n))
    if part.mask is not None:
        seen = _both(seen, load_operand(part.mask, i0, rows, j0, keys))
    if isinstance(part.k, Pages):
        seen = _both(seen, part.k.mapped(j0, keys))
    if seen is not None and (i0 < 0 or i0 + rows > part.q.shape[3]):  # rows outside see what nobody does
        i = torch.arange(i0, i0 + rows, device=part.q.device)[:, None]
        seen = seen & (i >= 0) & (i < part.q.shape[3])
    return seen


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Pairs that both allow; None allows all."""
    return b if a is None else a if b is None else a & b


def score_tile(part: Part, b_q: Tensor, b_k: Tensor, i0: int, rows: int, j0: int, keys: int) -> Scores:
    """Scores of a tile from b_q (b, Hkv, G·rows, D) and b_k (b, Hkv, keys, D), masked."""
    args, b_cap = part.args, None
    b_s = (b_q @ b_k.mT).mul_(part.scale).unflatten(2, (part.group, rows))
    if args.softcap:
        exact = _SOFTCAPS[0] < args.softcap < _SOFTCAPS[1]
        wide = torch.tanh((b_s if exact else b_s.double()) / args.softcap)
        b_cap, b_s = wide.to(part.kind), (wide * args.softcap).to(part.kind)
    visible = visible_pairs(part, i0, rows, j0, keys)
    if part.bias is not None:
        tile = load_operand(part.bias, i0, rows, j0, keys)
        unmasked = tile != -_INF
        visible = _both(visible, unmasked)
        b_s = b_s + converted(tile, part.kind)  # only a bias that was -inf masks
    if part.slopes is not None:
        j = torch.arange(j0, j0 + keys, device=b_s.device)
        b_s = b_s - part.slopes * (positions(part, i0, rows) - j).abs()
    return Scores(apply_mask(b_s, visible, -_INF), visible, b_cap)


def apply_mask(x: Tensor, visible: Tensor | None, value: float) -> Tensor:
    """`value` at invisible pairs, whatever was there; in place, so the mask's strides shape no result."""
    return x if visible is None else x.masked_fill_(~visible, value)


def online_softmax(b_s: Tensor, m_i: Tensor, l_i: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of a tile under the new maximum (over b_s), the new m and l, and the factor for older sums."""
    m_new = torch.maximum(m_i, b_s.amax(-1, keepdim=True))
    shift = m_new.masked_fill(m_new == -_INF, 0.0)
    alpha = torch.exp(m_i - shift)
    b_p = b_s.sub_(shift).exp_()
    return b_p, m_new, l_i * alpha + b_p.sum(-1, keepdim=True), alpha


def rescale(acc: Tensor, alpha: Tensor) -> Tensor:
    return acc.mul_(alpha)


def drop(part: Part, b_p: Tensor, i0: int, j0: int) -> Tensor:
    """Dropped weights are 0, the others grow by 1 / (1 - p)."""
    args = part.args
    if part.planes is None:
        return b_p
    rows, keys = b_p.shape[-2:]
    seed = 0 if args.dropout_seed is None else int(args.dropout_seed)
    i0, j0 = i0 + args.dropout_row, j0 + args.dropout_key
    keep = kept(part.planes, i0, rows, j0, keys, p=args.dropout_p, seed=seed)
    return torch.where(keep, b_p / (1.0 - args.dropout_p), 0.0)


def finite(x: Tensor) -> Tensor:
    """x with 0 for NaN and infinities, for products in which the other factor is 0 wherever x is not seen."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def nonfinite_sum(visible: Tensor | None, x: Tensor, group: int, rows: int) -> Tensor | None:
    """Sums what the NaN and infinities of x (b, Hkv, keys, C) add to the rows that see them:
    (b, Hkv, G·rows | 1, C) of 0, ±inf and NaN. None if x is known to be finite (a device is not asked)."""
    if x.device.type == "cpu" and math.isfinite(float(x.sum())):
        return None
    nan = torch.isnan(x)
    signs = torch.cat(((x == _INF) | nan, (x == -_INF) | nan), -1).to(torch.float32)
    if visible is None:
        counts = signs.sum(-2, keepdim=True)
    else:
        seen = visible.expand(x.shape[0], x.shape[1], group, rows, x.shape[2])
        counts = seen.flatten(2, 3).to(torch.float32) @ signs
    up, down = (counts > 0).chunk(2, -1)
    zero = torch.zeros(up.shape, dtype=x.dtype, device=x.device)
    return zero.masked_fill(up, _INF) + zero.masked_fill(down, -_INF)


def finalize(acc: Tensor, odd: Tensor | None, m_i: Tensor, l_i: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of a query tile; rows that saw no key are exactly 0 and -inf."""
    empty = l_i == 0.0
    out = torch.where(empty, 0.0, acc / l_i)
    if odd is not None:
        out = torch.where(odd == 0.0, out, out + odd)
    return out, torch.where(empty, -_INF, m_i.masked_fill(m_i == -_INF, 0.0) + torch.log(l_i))


def store_rows(target: Tensor, tile: Tensor, i0: int) -> None:
    """Writes a (b, Hkv, G, rows, C) tile at row i0 of (b, Hkv, G, Sq, C); rows outside are dropped."""
    lo, hi = max(i0, 0), min(i0 + tile.shape[3], target.shape[3])
    target[..., lo:hi, :].copy_(tile[..., lo - i0 : hi - i0, :])


def attend(part: Part, out: Tensor, lse: Tensor | None, config: Config) -> None:
    """The online softmax of one part; out (B, Hq, Sq, Dv) and lse (B, Hq, Sq) are written in place."""
    entries, num_kv_heads = part.k.shape[:2]
    for i0, rows in row_tiles(part, config):
        state = (entries, num_kv_heads, part.group, rows, 1)
        b_q = load_tile(part.q, i0, rows, part.kind).flatten(2, 3)
        m_i, l_i = part.q.new_full(state, -_INF, dtype=part.kind), part.q.new_zeros(state, dtype=part.kind)
        if part.sinks is not None:
            m_i = part.sinks.expand(state)
            l_i = torch.exp(m_i - m_i.masked_fill(m_i == -_INF, 0.0))
        acc = part.q.new_zeros((*state[:-1], part.v.shape[3]), dtype=part.kind)
        odd = None
        for j0, keys in key_tiles(part, i0, rows, config):
            b_s, visible, _ = score_tile(
                part, b_q, load_tile(part.k, j0, keys, part.kind), i0, rows, j0, keys
            )
            b_p, m_i, l_i, alpha = online_softmax(b_s, m_i, l_i)
            b_v = load_tile(part.v, j0, keys, part.kind)
            more = nonfinite_sum(visible, b_v, part.group, rows)
            if more is not None:
                b_v = finite(b_v)
                more = more.unflatten(2, (1, 1) if visible is None else (part.group, rows))
                odd = more if odd is None else odd + more
            b_p = drop(part, b_p, i0, j0).flatten(2, 3)
            acc = rescale(acc, alpha).add_((b_p @ b_v).unflatten(2, (part.group, rows)))
        b_out, b_lse = finalize(acc, odd, m_i, l_i)
        store_rows(part.of(out), b_out, i0)
        if lse is not None:
            store_rows(part.of(lse.unsqueeze(-1)), b_lse, i0)


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fills out (B, Hq, Sq, Dv) and, if asked for, lse (B, Hq, Sq); q (B, Hq, Sq, D), k (B, Hkv, Sk, D),
    v (B, Hkv, Sk, Dv), any strides. With a page table k and v are pools (num_pages, Hkv, page_size, ·)."""
    config: Config = launch.config
    with torch.no_grad():
        if config.sdpa and handover.hands_over(launch, q, k, v, args):

            def tiled() -> Tensor:
                for part in parts(q, k, v, args, config):
                    attend(part, out, None, config)
                return out

            return handover.attend(q, k, v, out, args, tiled), lse
        if args.cu_seqlens_q is not None:  # what belongs to no member
            out.zero_()
            if args.need_lse:
                lse.fill_(-_INF)
        for part, rows, _ in batches(q, k, v, args, config):
            attend(part, rows(out), rows(lse) if args.need_lse else None, config)
    return out, lse
