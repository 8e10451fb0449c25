"""Decode over quantised keys and values: the forward's walk, with K and V loaded as codes.

    value[j, d] = decode(code[j, d])·scale[j // T, d // C] + shift[j // Ts, d // Cs]

Codes are loaded as words of 16 bits, each of PER channels of a key, so that matrix instructions read them
as they read 16-bit operands; class r of a tile is channel PER·w + r of every word w, and Q and the output
are held by classes likewise. Products are of bfloat16, which holds every code exactly, and of one, two or
three bfloat16 parts of q and of the weights, as their dtype needs. Codes of 8 bits with scales of keys are
float16 (HALF) beside a bfloat16 q, which takes fewer instructions; q and scales of V are then multiplied by
powers of two that keep them in its range. Scales leave the tiles where they can: of keys they go to scores
and weights, of channels to q and to the sums of a block, and of groups of channels of V, where all rows see
the same keys, to a product of weights each. Others are applied to the tile ("element"); one of V is then in
two parts beside float16, or rounded as a decoded tensor is, and for bfloat16 on NVIDIA so are its scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from polyflash.backends.triton.codes_tiles import (
    classes,
    decoded,
    divides,
    dot,
    fitted,
    holds,
    load_grouped,
    of_channels,
    of_class,
    of_groups,
    of_keys,
    of_own_group,
    of_parts,
    offsets_of_block,
    once,
    ones,
    parts_of,
    power,
    product_of_halves,
    room,
    rounded_values,
    scaled_weights,
    summed,
    times,
    turned,
    twice,
    values,
)
from polyflash.backends.triton.forward_kernel import finalize, of_split
from polyflash.backends.triton.places import (
    Blocks,
    Keys,
    find_rows,
    head_offsets,
    load_tile,
    load_turned,
    narrowed,
    tile_rows,
    unravel,
)
from polyflash.backends.triton.products import finite, negated
from polyflash.backends.triton.scores import (
    LOWEST,
    Sums,
    apply_mask,
    change_scores,
    online_softmax,
    touched,
    visible_pairs,
)


class CodedTensors(NamedTuple):
    """`t` of `attend_codes`: K and V as words, and views (batch or pages, heads, blocks of tokens, blocks of
    channels) of their tables."""

    q: Any
    k: Any
    v: Any
    k_scale: Any
    k_shift: Any
    v_scale: Any
    v_shift: Any
    out: Any
    lse: Any
    x: Any
    num_heads: Any
    group: Any
    end: Any = None  # see `runtime.compile`


class Side(NamedTuple):
    """How K or V is coded: constants."""

    CODES: Any  # dtype
    PER: Any  # channels of a word
    WORDS: Any  # of a tile
    DIM: Any  # channels
    SCALE: Any  # what has one: "key", "channel" or "element"
    TOKENS: Any  # that share it, and channels; 0: all
    CHANNELS: Any
    SHIFT: Any  # likewise; "": there is none
    SHIFT_TOKENS: Any
    SHIFT_CHANNELS: Any
    HALF: Any  # are products of float16?


class CodedSums(NamedTuple):
    """`Sums` by classes of channels, and of the weights times the shifts of keys. `room`: the
    exponent of what a HALF V is multiplied by."""

    m_i: Any
    l_i: Any
    l_lost: Any
    shifts: Any
    acc0: Any
    acc1: Any
    acc2: Any
    acc3: Any
    room: Any


class Weights(NamedTuple):
    """The weights of a block, times the scales of keys: whole and in parts; which pairs see each other, what
    each row's weights sum to without scales, and the factor of older sums."""

    b_p: Any
    b_parts: Any
    b_seen: Any
    b_some: Any
    alpha: Any


@triton.jit
def score_class(
    CLASS: tl.constexpr, PARTS: tl.constexpr, scores, b_q, b_halves, b_w, keys, side, rows, place, t, c
):
    """Adds what a class of channels says of the scores of a block: products, and what its shifts add to all
    keys."""
    b_s, shifts = scores
    # Integers lie below the bits of 128 as they are loaded: of channels this leaves with the shifts.
    HIGH: tl.constexpr = side.CODES == "int4" and side.SCALE == "channel" and c.PARTS == 1
    b_k = decoded(b_w, CLASS, "int4+136" if HIGH else side.CODES, c.PTX, side.HALF)
    b_x = b_q[CLASS]
    b_wide = b_x.to(tl.float32)
    ROUNDED: tl.constexpr = side.SCALE == "element" and side.CODES == "mxfp4" and c.PTX
    if ROUNDED and (c.PARTS == 1 or holds(t.k_scale.p.dtype.element_ty, side.CODES, side.SHIFT)):
        b_k = rounded_values(b_k, keys, t.k_scale, t.k_shift, CLASS, side, True, rows, place, t, c)
        b_s = times(parts_of(b_x, c.PARTS), b_k, b_s, c.PARTS, c)
    elif side.SCALE == "element":
        b_k = values(b_k, keys, t.k_scale, t.k_shift, CLASS, side, True, rows, place, t, c)
        if c.PARTS == 1 or divides(c.PARTS, side.CODES):  # two parts, as of a scaled q
            b_high, b_low, _ = parts_of(b_k, 2, side.CODES == "fp8_e5m2")
            b_parts = parts_of(b_x, c.PARTS)
            b_s = times(b_parts, b_high, dot(b_parts[0], b_low, b_s, c), c.PARTS, c)
        else:
            b_s = dot(b_wide, b_k, b_s, c)
    elif side.SCALE == "channel":
        b_scale = of_class(keys.j_0, t.k_scale, side.TOKENS, CLASS, side, rows, place, t, c)
        b_s = times(parts_of(b_wide * b_scale[None, :], PARTS, False), b_k, b_s, PARTS, c)
    elif side.HALF:
        b_s = dot(b_halves[CLASS], b_k, b_s, c)
    else:
        b_s = times(parts_of(b_x, PARTS), b_k, b_s, PARTS, c)
    if side.SHIFT == "channel":
        b_shift = of_class(keys.j_0, t.k_shift, side.SHIFT_TOKENS, CLASS, side, rows, place, t, c)
        if HIGH:
            b_shift = tl.fma(b_scale, -136.0, b_shift)
        shifts = tl.fma(b_wide, tl.broadcast_to(b_shift[None, :], b_wide.shape), shifts)
    elif HIGH:
        shifts = tl.fma(b_wide, tl.broadcast_to((b_scale * -136.0)[None, :], b_wide.shape), shifts)
    return b_s, shifts


@triton.jit
def score_block(b_q, o_k, keys, side, rows, place, t, c):
    """q·k of a block, [BLOCK_M, BLOCK_N]."""
    b_halves, b_down = b_q, 1.0
    if side.HALF:
        b_halves, b_down = fitted(b_q)
        b_halves = classes(b_halves, side.PER)
    b_q = classes(b_q, side.PER)
    b_w = load_turned(t.k, o_k, keys.m_n, 0, side.DIM // side.PER, side.WORDS, c.CACHE, c.ALIGNED)
    # Two parts of a scaled q: what is rounded of it is the same for all keys, and would show in their sum.
    PARTS: tl.constexpr = 2 if side.SCALE == "channel" and c.PARTS == 1 else c.PARTS
    scores = (
        turned(twice(tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32), c), c),
        tl.zeros([c.BLOCK_M, side.WORDS], tl.float32),
    )
    scores = score_class(0, PARTS, scores, b_q, b_halves, b_w, keys, side, rows, place, t, c)
    scores = score_class(1, PARTS, scores, b_q, b_halves, b_w, keys, side, rows, place, t, c)
    if side.PER > 2:
        scores = score_class(2, PARTS, scores, b_q, b_halves, b_w, keys, side, rows, place, t, c)
        scores = score_class(3, PARTS, scores, b_q, b_halves, b_w, keys, side, rows, place, t, c)
    b_s = once(scores[0], c)
    if side.HALF:
        b_s = b_s * b_down[:, None]
    if side.SCALE == "key":
        b_s = b_s * of_keys(keys, t.k_scale, side.TOKENS, rows, place, t, c)[None, :]
    if side.SCALE == "channel" or side.SHIFT == "channel":
        b_s += tl.sum(scores[1], 1)[:, None]
    if side.SHIFT == "key":
        b_t = of_keys(keys, t.k_shift, side.SHIFT_TOKENS, rows, place, t, c)
        b_sum = tl.sum(b_q[0].to(tl.float32) + b_q[1].to(tl.float32), 1)
        if side.PER > 2:
            b_sum += tl.sum(b_q[2].to(tl.float32) + b_q[3].to(tl.float32), 1)
        b_s += b_sum[:, None] * b_t[None, :]
    return b_s


@triton.jit
def score_channels(b_q, o_k, keys, side, rows, place, t, c):
    """q·k of a block, [BLOCK_M, BLOCK_N], where channels of K have scales and products are TURNED: one
    product, of all classes of k with two parts of a scaled q."""
    # Integers lie below the bits of 128 as they are loaded: this leaves with the shifts.
    HIGH: tl.constexpr = side.CODES == "int4" and c.PARTS == 1
    b_w = load_tile(t.k, o_k, keys.m_n, 0, side.DIM // side.PER, side.WORDS, c.CACHE, c.ALIGNED)
    b_wide = b_q.to(tl.float32)
    b_scale = of_channels(keys.j_0, t.k_scale, side.TOKENS, side, rows, place, t, c)
    CODES: tl.constexpr = "int4+136" if HIGH else side.CODES
    b_s = product_of_halves(b_q, b_scale, b_w, CODES, side.PER, c)
    b_scale = b_scale.to(tl.float32)
    if side.SHIFT == "channel":
        b_t = of_channels(keys.j_0, t.k_shift, side.SHIFT_TOKENS, side, rows, place, t, c)
        if HIGH:
            b_t = tl.fma(b_scale, -136.0, b_t)
        b_s += tl.sum(b_wide * b_t[None, :], 1)[:, None]
    elif HIGH:
        b_s += tl.sum(b_wide * (b_scale * -136.0)[None, :], 1)[:, None]
    if side.SHIFT == "key":
        b_t = of_keys(keys, t.k_shift, side.SHIFT_TOKENS, rows, place, t, c)
        b_s += tl.sum(b_wide, 1)[:, None] * b_t[None, :]
    return b_s


@triton.jit
def add_class(CLASS: tl.constexpr, acc, weights, b_w, keys, side, rows, place, t, c, AGAIN: tl.constexpr):
    """acc·alpha + weights · V of a class of channels; AGAIN: of the finite values, and then the others to the
    rows that see them."""
    b_p, b_parts, b_seen, b_some, alpha = weights
    # Integers lie below the bits of 128 as they are loaded: this leaves the sum of a block.
    HIGH: tl.constexpr = c.TURNED and side.CODES == "int4" and side.SCALE == "key" and c.PARTS == 1
    b_v = decoded(b_w, CLASS, "int4+136" if HIGH and not AGAIN else side.CODES, c.PTX, side.HALF)
    if side.SCALE == "element":
        if c.PTX and (c.PARTS == 1 or holds(t.v_scale.p.dtype.element_ty, side.CODES, side.SHIFT)):
            b_v = rounded_values(b_v, keys, t.v_scale, t.v_shift, CLASS, side, c.TURNED, rows, place, t, c)
        else:
            b_v = values(b_v, keys, t.v_scale, t.v_shift, CLASS, side, c.TURNED, rows, place, t, c)
            b_v = b_v.to(tl.bfloat16) if c.PARTS == 1 else b_v
    b_v = turned(b_v, c)
    b_all = b_v.to(tl.float32)
    if AGAIN:
        b_v = finite(b_v)
    b_alpha = turned(twice(alpha, c)[:, None], c)
    b_some = twice(b_some, c)
    if HIGH and not AGAIN:
        b_o = dot(
            b_parts[0],
            tl.full(b_v.shape, -136.0, tl.float32).to(tl.bfloat16),
            tl.zeros(acc.shape, tl.float32),
            c,
        )
        return tl.fma(acc, tl.broadcast_to(b_alpha, acc.shape), dot(b_parts[0], b_v, b_o, c))
    acc = acc * b_alpha
    if side.SCALE == "channel":
        b_o = times(b_parts, b_v, tl.zeros(acc.shape, tl.float32), c.PARTS, c)
        b_t = of_class(keys.j_0, t.v_scale, side.TOKENS, CLASS, side, rows, place, t, c)
        acc += tl.where(turned((b_some == 0.0)[:, None], c), 0.0, b_o * turned(b_t[None, :], c))
    elif b_v.dtype == tl.float32 and divides(c.PARTS, side.CODES):
        b_high, b_low, _ = parts_of(b_v, 2)
        acc = times(b_parts, b_high, dot(b_parts[0], b_low, acc, c), 2, c)
    elif b_v.dtype == tl.float32:
        acc += dot(b_p, b_v, tl.zeros(acc.shape, tl.float32), c)
    else:
        acc = times(b_parts, b_v, acc, c.PARTS, c)
    if side.SHIFT == "channel":
        b_t = of_class(keys.j_0, t.v_shift, side.SHIFT_TOKENS, CLASS, side, rows, place, t, c)
        acc += turned(tl.where((b_some == 0.0)[:, None], 0.0, b_some[:, None] * b_t[None, :]), c)
    if AGAIN:
        b_one, b_none = ones(b_seen), tl.zeros(acc.shape, tl.float32)
        b_up = dot(b_one, ones(b_all == float("inf")), b_none, c)
        b_down = dot(b_one, ones(b_all == float("-inf")), b_none, c)
        b_odd = dot(b_one, ones(b_all != b_all), b_none, c)
        acc += tl.where(b_up > 0.0, float("inf"), 0.0) + tl.where(b_down > 0.0, float("-inf"), 0.0)
        acc += tl.where(b_odd > 0.0, float("nan"), 0.0)
    return acc


@triton.jit
def add_groups(b_p, alpha, sums, keys, side, rows, place, t, c):
    """`add_block` of rows that see the same keys where groups of 8 words have scales: weights are scaled, not
    V, by the scales of either group of a pair as columns of a product of both, of which each has its own at
    the end."""
    PAIRS: tl.constexpr = side.WORDS // 16
    HIGH: tl.constexpr = side.CODES == "int4" and c.PARTS == 1
    o_v, _ = offsets_of_block(keys.j_0, t.v, rows, place, t, c)
    b_w, b_p = load_grouped(o_v, keys.m_n, side, t, c), tl.trans(b_p)[None, :, :, None]
    b_x = scaled_weights(b_p, of_groups(keys, t.v_scale, side.TOKENS, side, rows, place, t, c), c)
    b_one = tl.full([PAIRS, 16, c.BLOCK_N], 1.0, tl.float32)
    b_o = tl.zeros([PAIRS, 16, 2 * c.BLOCK_M], tl.float32)
    if HIGH:
        b_o = of_parts((b_one * -136.0).to(tl.bfloat16), b_x, b_o, c)
    if side.SHIFT != "":
        b_t = scaled_weights(b_p, of_groups(keys, t.v_shift, side.SHIFT_TOKENS, side, rows, place, t, c), c)
        b_o = of_parts(b_one.to(tl.bfloat16), b_t, b_o, c)
    b_alpha = tl.join(alpha, alpha).reshape(2 * c.BLOCK_M)
    b_alpha = tl.broadcast_to(b_alpha[None, None, :], b_o.shape)
    CODES: tl.constexpr = "int4+136" if HIGH else side.CODES
    acc0 = tl.fma(sums.acc0, b_alpha, of_parts(decoded(b_w, 0, CODES, c.PTX), b_x, b_o, c))
    acc1 = tl.fma(sums.acc1, b_alpha, of_parts(decoded(b_w, 1, CODES, c.PTX), b_x, b_o, c))
    acc2 = tl.fma(sums.acc2, b_alpha, of_parts(decoded(b_w, 2, CODES, c.PTX), b_x, b_o, c))
    acc3 = tl.fma(sums.acc3, b_alpha, of_parts(decoded(b_w, 3, CODES, c.PTX), b_x, b_o, c))
    return CodedSums(sums.m_i, sums.l_i, sums.l_lost, sums.shifts, acc0, acc1, acc2, acc3, sums.room)


@triton.jit
def add_block(b_s, b_p, alpha, sums, keys, side, rows, place, t, c, AGAIN: tl.constexpr):
    """The sums with a block's share of the output."""
    o_v, _ = offsets_of_block(keys.j_0, t.v, rows, place, t, c)
    if c.TURNED:
        b_w = load_turned(t.v, o_v, keys.m_n, 0, side.DIM // side.PER, side.WORDS, c.CACHE, c.ALIGNED)
    else:
        b_w = load_tile(t.v, o_v, keys.m_n, 0, side.DIM // side.PER, side.WORDS, c.CACHE, c.ALIGNED)
    b_seen, b_some, shifts = b_s != float("-inf"), tl.sum(b_p, 1), sums.shifts
    if side.SHIFT == "key":
        b_t = of_keys(keys, t.v_shift, side.SHIFT_TOKENS, rows, place, t, c)
        b_x = b_p * b_t[None, :]  # 0 by 0 of keys that no row sees
        shifts = summed(b_x if c.ALONE else tl.where(b_seen, b_x, 0.0), shifts, alpha, c)
    i_room = sums.room
    if side.SCALE == "key":
        b_t = of_keys(keys, t.v_scale, side.TOKENS, rows, place, t, c)
        if side.HALF:
            i_room = tl.minimum(i_room, room(tl.max(tl.abs(b_t), 0)))
            b_t, alpha = b_t * power(i_room), alpha * power(127 + i_room - sums.room)
        b_p = b_p * b_t[None, :]
        b_p = b_p if c.ALONE else tl.where(b_seen, b_p, 0.0)
    if side.HALF:
        b_half = b_p.to(tl.float16)
        weights = Weights(b_p, (b_half, b_half, b_half), b_seen, b_some, alpha)
    else:
        weights = Weights(b_p, parts_of(b_p, c.PARTS), b_seen, b_some, alpha)
    acc2, acc3 = sums.acc2, sums.acc3
    acc0 = add_class(0, sums.acc0, weights, b_w, keys, side, rows, place, t, c, AGAIN)
    acc1 = add_class(1, sums.acc1, weights, b_w, keys, side, rows, place, t, c, AGAIN)
    if side.PER > 2:
        acc2 = add_class(2, acc2, weights, b_w, keys, side, rows, place, t, c, AGAIN)
        acc3 = add_class(3, acc3, weights, b_w, keys, side, rows, place, t, c, AGAIN)
    return CodedSums(sums.m_i, sums.l_i, sums.l_lost, shifts, acc0, acc1, acc2, acc3, i_room)


@triton.jit
def attend_coded_block(i_n, blocks, sums, b_q, k_side, v_side, rows, place, t, n, c, AGAIN: tl.constexpr):
    """One key block: its scores, their weights, their share of the output."""
    j_0 = i_n * c.BLOCK_N
    o_k, m_n = offsets_of_block(j_0, t.k, rows, place, t, c)
    o_n = j_0 + tl.arange(0, c.BLOCK_N)
    if c.ALONE and (c.HAS_LEFT or t.x.kv_starts is not None or t.x.row_bounds is not None):
        m_n = m_n & (o_n >= place.start)  # else that is 0
    keys = Keys(j_0, o_n, m_n)
    if c.TURNED and k_side.SCALE == "channel":
        b_s = score_channels(b_q, o_k, keys, k_side, rows, place, t, c)
    else:
        b_s = score_block(b_q, o_k, keys, k_side, rows, place, t, c)
    if c.CHANGED:
        b_s, _ = change_scores(b_s, t.x, place, rows, keys, n, c.SOFTCAP)
    if t.x.page_table is not None:  # an entry that names no page hides its keys
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
    if c.ALWAYS_MASKED:
        b_s = apply_mask(b_s, visible_pairs(t.x, place, rows, keys, c.BELOW), float("-inf"), False)
    elif i_n < blocks.full_lo or i_n >= blocks.full_hi:
        b_s = apply_mask(b_s, visible_pairs(t.x, place, rows, keys, c.BELOW), float("-inf"), False)
    b_p, m_i, l_i, l_lost, alpha = online_softmax(b_s, sums, n.factor, None, c)
    older = CodedSums(m_i, l_i, l_lost, *sums[3:])
    if c.V_GROUPED:
        return add_groups(b_p, alpha, older, keys, v_side, rows, place, t, c)
    else:
        return add_block(b_s, b_p, alpha, older, keys, v_side, rows, place, t, c, AGAIN)


@triton.jit
def attend_coded_blocks(blocks, sums, b_q, rows, place, t, n, c, AGAIN: tl.constexpr):
    """The online softmax over key blocks, less those that no interval list touches."""
    STAGES: tl.constexpr = c.AGAIN_STAGES if AGAIN else c.NUM_STAGES
    for i_n in tl.range(blocks.lo, blocks.hi, num_stages=STAGES):
        if t.x.intervals is None or touched(i_n * c.BLOCK_N, t.x, place, rows, c.BLOCK_N):
            sums = attend_coded_block(
                i_n,
                blocks,
                sums,
                b_q,
                Side(
                    c.K_CODES,
                    c.K_PER,
                    c.K_WORDS,
                    c.D,
                    c.K_SCALE,
                    c.K_TOKENS,
                    c.K_CHANNELS,
                    c.K_SHIFT,
                    c.K_SHIFT_TOKENS,
                    c.K_SHIFT_CHANNELS,
                    c.K_HALF,
                ),
                Side(
                    c.V_CODES,
                    c.V_PER,
                    c.V_WORDS,
                    c.DV,
                    c.V_SCALE,
                    c.V_TOKENS,
                    c.V_CHANNELS,
                    c.V_SHIFT,
                    c.V_SHIFT_TOKENS,
                    c.V_SHIFT_CHANNELS,
                    c.V_HALF,
                ),
                rows,
                place,
                t,
                n,
                c,
                AGAIN,
            )
    return sums


@triton.jit
def load_rows(rows, place, t, c):
    """The rows of a tile."""
    o_q = head_offsets(t.q, place.i_batch, rows.o_h, place.first_q + rows.o_i)
    b_q = load_tile(t.q, o_q, rows.m_row, 0, c.D, c.K_PER * c.K_WORDS, "")
    if c.NEGATIVE:
        b_q = negated(b_q)
    return b_q


@triton.jit
def output_class(acc, c):
    """A class of the output, [rows, words]."""
    if c.V_GROUPED:
        return of_own_group(acc)
    else:
        return once(acc, c)


@triton.jit
def interleaved(sums, c):
    """The output's classes as one tile."""
    b_even, b_odd, shifts = output_class(sums.acc0, c), output_class(sums.acc1, c), sums.shifts
    if c.V_PER > 2:
        b_even = tl.join(b_even, output_class(sums.acc2, c))
        b_odd = tl.join(b_odd, output_class(sums.acc3, c))
    b_all = tl.join(b_even, b_odd).reshape(c.BLOCK_M, c.V_PER * c.V_WORDS)
    if c.V_HALF:
        b_all = b_all * power(254 - sums.room)
    if c.TURNED:
        shifts = tl.sum(shifts, 1)
    return b_all + shifts[:, None]


@triton.jit
def attend_codes(t, n, c):
    """One program per tile of rows and split of keys, splits the fastest."""
    i_t, i_s = tl.program_id(0) // n.num_splits, tl.program_id(0) % n.num_splits
    i_m, i_head, i_b = unravel(i_t, n.num_tiles, t.num_heads)
    i_m, place = find_rows(i_m, i_b, t, n, c)
    rows, blocks = tile_rows(i_m, i_head, place, t, n, c)
    if c.SPLIT:
        blocks = of_split(i_s, blocks, n, c)
    if c.ALONE:  # what no row sees is not loaded
        place = narrowed(rows, place, t, n, c)
    b_q = load_rows(rows, place, t, c)
    m_i, l_i = tl.full([c.BLOCK_M], LOWEST, tl.float32), tl.zeros([c.BLOCK_M], tl.float32)
    if c.V_GROUPED:
        acc = tl.zeros([c.V_WORDS // 16, 16, 2 * c.BLOCK_M], tl.float32)
    else:
        acc = turned(twice(tl.zeros([c.BLOCK_M, c.V_WORDS], tl.float32), c), c)
    rest = acc if c.V_PER > 2 else m_i
    late_sums = tl.zeros([c.BLOCK_M, min(32, c.BLOCK_N)], tl.float32) if c.TURNED else l_i
    fresh = CodedSums(m_i, late_sums, l_i, late_sums, acc, acc, rest, rest, tl.cast(253, tl.int32))
    sums = attend_coded_blocks(blocks, fresh, b_q, rows, place, t, n, c, False)
    if not c.FINITE:  # a weight of 0 times a hidden NaN is NaN
        total = tl.sum(tl.ravel(interleaved(sums, c), can_reorder=True), 0)
        if total - total != 0.0:
            hiding = Blocks(blocks.lo, blocks.hi, blocks.lo, blocks.lo)
            b_q = load_rows(rows, place, t, c)
            sums = attend_coded_blocks(hiding, fresh, b_q, rows, place, t, n, c, True)
    units = -n.scale if c.NEGATIVE else n.scale
    if c.CHANGED:
        units = 1.0
    acc, l_i = interleaved(sums, c), sums.l_i
    if c.TURNED:
        l_i = tl.sum(l_i, 1)
    finalize(i_s, Sums(sums.m_i, l_i, acc, acc, sums.l_lost, l_i, l_i), units, rows, place, t, n, c)
