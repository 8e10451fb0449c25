"""Tiles of codes: decoded, in parts, with scales and shifts; how they are multiplied and added up. Arguments
have the names of `codes_kernel`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from polyflash.backends.triton.places import block_offsets, table_rows
from polyflash.backends.triton.products import product
from polyflash.backends.triton.ptx import halves, multiply_add, product_halves, unpacked, unpacked_bytes


@triton.jit
def decoded(b_w, CLASS: tl.constexpr, CODES: tl.constexpr, PTX: tl.constexpr, HALF: tl.constexpr = False):
    """The codes of a class of channels, bfloat16; HALF: float16."""
    if PTX and HALF:
        b_x, b_y = unpacked_bytes(b_w, CODES)
        b_x = b_x if CLASS == 0 else b_y
    elif PTX:
        b_x = unpacked(b_w, CLASS, CODES)
    else:
        b_i = b_w.to(tl.int32)
        if CODES == "int8":
            b_x = ((b_i << (24 - 8 * CLASS)) >> 24).to(tl.float32)
        elif CODES == "int4" or CODES == "int4+136":
            b_x = (((b_i >> (4 * CLASS)) & 15) + (-8 if CODES == "int4" else 128)).to(tl.float32)
        elif CODES == "mxfp4":
            b_i = b_i >> (4 * CLASS)
            b_x = (((b_i & 8) << 28) | ((b_i & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126
        elif CODES == "fp8_e4m3":
            b_i = b_i >> (8 * CLASS)
            b_x = (((b_i & 128) << 24) | ((b_i & 127) << 20)).to(tl.float32, bitcast=True) * 2.0**120
            b_x = tl.where((b_i & 127) == 127, float("nan"), b_x)
        else:
            b_i = b_i >> (8 * CLASS)
            b_x = (((b_i & 128) << 24) | ((b_i & 127) << 21)).to(tl.float32, bitcast=True) * 2.0**112
            b_x = tl.where((b_i & 127) == 124, tl.where((b_i & 128) == 0, float("inf"), float("-inf")), b_x)
            b_x = tl.where((b_i & 127) > 124, float("nan"), b_x)
    return b_x.to(tl.float16 if HALF else tl.bfloat16)


@triton.jit
def room(b_top):
    """The biased exponent of the power of two that puts a largest value below 2^15."""
    b_e = (b_top.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.minimum(268 - b_e, 253)


@triton.jit
def power(b_e):
    """2^(e - 127), 0 if that is too small."""
    return (tl.maximum(b_e, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fitted(b_q):
    """bfloat16 rows times powers of two as float16, exact to 2^-39 of the largest of a row, and what takes
    them off a row again."""
    b_x = b_q.to(tl.float32)
    b_e = room(tl.max(tl.abs(b_x), 1))
    return (b_x * power(b_e)[:, None]).to(tl.float16), power(254 - b_e)


@triton.jit
def parts_of(b_x, PARTS: tl.constexpr, INFINITE: tl.constexpr = True):
    """x as a sum of bfloat16 parts; if it may be INFINITE, the first says all of it."""
    b_x = b_x.to(tl.float32)
    if PARTS == 2 and not INFINITE:  # rounded by its bits, which costs less than there and back
        b_high = (b_x.to(tl.int32, bitcast=True) + 0x8000) & -65536
        b_0 = (b_high >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        b_1 = (b_x - b_high.to(tl.float32, bitcast=True)).to(tl.bfloat16)
        return b_0, b_1, b_1
    b_0 = b_x.to(tl.bfloat16)
    b_1, b_2 = b_0, b_0
    if PARTS > 1:
        b_x = b_x - b_0.to(tl.float32)
        if INFINITE:
            b_x = tl.where(b_x == b_x, b_x, 0.0)
        b_1 = b_x.to(tl.bfloat16)
    if PARTS > 2:
        b_2 = (b_x - b_1.to(tl.float32)).to(tl.bfloat16)
    return b_0, b_1, b_2


@triton.jit
def turned(b_x, c):
    return tl.trans(b_x) if c.TURNED else b_x


@triton.jit
def twice(b_x, c):
    """Rows, or what they have, as columns of TURNED products, which are 8: of 4 each one twice."""
    if c.TURNED and c.BLOCK_M < 8:
        if len(b_x.shape) == 1:
            b_x = tl.join(b_x, b_x).reshape(2 * c.BLOCK_M)
        else:
            b_x = tl.join(b_x, b_x).permute(0, 2, 1).reshape(2 * c.BLOCK_M, b_x.shape[1])
    return b_x


@triton.jit
def once(b_x, c):
    """Rows of a product, turned back."""
    b_x = turned(b_x, c)
    if c.TURNED and c.BLOCK_M < 8:
        b_x, _ = b_x.reshape(c.BLOCK_M, 2, b_x.shape[1]).permute(0, 2, 1).split()
    return b_x


@triton.jit
def dot(b_x, b_y, acc, c):
    """acc + x @ y, both TURNED where rows are few: instructions have 16 rows or more, but 8 columns. Of 4
    rows acc has each `twice`."""
    if c.TURNED:
        b_x, b_y = tl.trans(b_y), tl.trans(twice(b_x, c))
    return product(b_x, b_y, acc, c.PRODUCT) if b_x.dtype == tl.float32 else tl.dot(b_x, b_y, acc)


@triton.jit
def times(b_parts, b_y, acc, PARTS: tl.constexpr, c):
    """acc + x @ y of an x in parts, small terms first."""
    b_0, b_1, b_2 = b_parts
    if PARTS > 2:
        acc = dot(b_2, b_y, acc, c)
    if PARTS > 1:
        acc = dot(b_1, b_y, acc, c)
    return dot(b_0, b_y, acc, c)


@triton.jit
def offsets_of_block(j_0, x, rows, place, t, c):
    """`block_offsets` of K or V. Of TURNED products, whose registers allow it, what is the same for all
    blocks stands apart, so that it leaves the loop."""
    o_x, m_n = block_offsets(j_0, x, t.x, rows.i_hkv, place, c)
    if c.TURNED and t.x.page_table is None:
        o_x = tl.cast(place.i_batch, tl.int64) * x.b + tl.cast(rows.i_hkv, tl.int64) * x.h
        o_x += tl.cast(place.first_k + j_0, tl.int64) * x.s
        o_x = o_x + tl.arange(0, c.BLOCK_N).to(tl.int64) * x.s
    return o_x, m_n


@triton.jit
def entries_at(table, o_x, m):
    """Entries of a table, 0 where `m` says no. Those of 16 bits come in words of 32, which are copied to
    shared memory ahead of their use: alone they would be waited for."""
    if table.p.dtype.element_ty == tl.bfloat16:
        b_w = words_at(table, o_x, m)
        b_even, b_odd = b_w << 16, b_w & -0x10000
        b_x = tl.where((o_x & 1) == 0, b_even, b_odd).to(tl.float32, bitcast=True)
    else:
        b_x = tl.load(table.p + o_x, mask=m, other=0.0)
    return b_x


@triton.jit
def pairs_at(table, o_x, m):
    """Entries of 16 bits at even offsets and those behind them, side by side, bfloat16."""
    b_w = words_at(table, o_x, m)
    b_even, b_odd = (b_w & 0xFFFF).to(tl.int16), (b_w >> 16).to(tl.int16)
    return tl.join(b_even.to(tl.bfloat16, bitcast=True), b_odd.to(tl.bfloat16, bitcast=True))


@triton.jit
def words_at(table, o_x, m):
    """Words of 32 bits, of two entries each."""
    return tl.load(table.p.to(tl.pointer_type(tl.int32)) + (o_x >> 1), mask=m, other=0)


@triton.jit
def of_keys(keys, table, TOKENS: tl.constexpr, rows, place, t, c):
    """The entry of each key of a block."""
    return entries_at(table, table_rows(keys.o_n, table, TOKENS, rows, place, t, c), keys.m_n)


@triton.jit
def of_class(j_0, table, TOKENS: tl.constexpr, CLASS: tl.constexpr, side, rows, place, t, c):
    """The entries of a class of channels for the block from key j_0 on, all of whose keys have the same."""
    o_d = side.PER * tl.arange(0, side.WORDS) + CLASS
    o_table = table_rows(j_0, table, TOKENS, rows, place, t, c)
    return entries_at(table, o_table + o_d * table.d, o_d < side.DIM)


@triton.constexpr_function
def paired(dtype: Any, entries: int, dim: int, channels: int) -> bool:
    """Does each word of a row hold two of its entries, as launches see to where they are even in number?"""
    return dtype == tl.bfloat16 and entries > 1 and channels > 0 and dim % (2 * channels) == 0


@triton.jit
def of_elements(
    keys, table, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, CLASS: tl.constexpr, side, rows, place, t, c
):
    """The entry of every key and channel of a class, [BLOCK_N, WORDS]."""
    o_table = table_rows(keys.o_n, table, TOKENS, rows, place, t, c)
    GROUPS: tl.constexpr = groups_of(side.PER, side.WORDS, CHANNELS)
    if GROUPS > 0:  # of whole words, which all classes share
        if paired(table.p.dtype.element_ty, GROUPS, side.DIM, CHANNELS):
            o_c = 2 * tl.arange(0, GROUPS // 2)
            m = keys.m_n[:, None] & (o_c * CHANNELS < side.DIM)[None, :]
            b_x = pairs_at(table, o_table[:, None] + o_c[None, :], m).reshape(c.BLOCK_N, GROUPS)
        else:
            o_c = tl.arange(0, GROUPS)
            m = keys.m_n[:, None] & (o_c * CHANNELS < side.DIM)[None, :]
            b_x = entries_at(table, o_table[:, None] + o_c[None, :] * table.d, m)
        b_x = tl.broadcast_to(b_x[:, :, None], [c.BLOCK_N, GROUPS, side.WORDS // GROUPS])
        b_x = b_x.reshape(c.BLOCK_N, side.WORDS)
    else:
        o_d = side.PER * tl.arange(0, side.WORDS) + CLASS
        o_c = o_d // CHANNELS if CHANNELS > 0 else o_d * 0
        m = keys.m_n[:, None] & (o_d < side.DIM)[None, :]
        b_x = entries_at(table, o_table[:, None] + o_c[None, :] * table.d, m)
    return b_x


@triton.jit
def load_grouped(o_v, m_n, side, t, c):
    """Words of V [pairs of groups, 16, keys]: those of two groups are the rows of an instruction."""
    o_w = 16 * tl.arange(0, side.WORDS // 16)[:, None, None] + tl.arange(0, 16)[None, :, None]
    m = m_n[None, None, :]
    if side.PER * side.WORDS > side.DIM:
        m = m & (o_w < side.DIM // side.PER)
    o_x = o_v[None, None, :]
    if c.ALIGNED > 1:
        o_x = tl.multiple_of(o_x, [c.ALIGNED, c.ALIGNED, c.ALIGNED])
    p_w = t.v.p + o_x + o_w * t.v.d
    return tl.load(p_w, mask=m, other=0, cache_modifier=c.CACHE)


@triton.jit
def of_groups(keys, table, TOKENS: tl.constexpr, side, rows, place, t, c):
    """The entry of every key and group of channels, [pairs of groups, keys, 1, 2]."""
    o_table = table_rows(keys.o_n, table, TOKENS, rows, place, t, c)
    o_g, m = 2 * tl.arange(0, side.WORDS // 16)[:, None], keys.m_n[None, :]
    if paired(table.p.dtype.element_ty, side.WORDS // 8, side.DIM, side.CHANNELS):
        m = m & (o_g * side.CHANNELS < side.DIM)
        b_x = pairs_at(table, o_table[None, :] + o_g, m)[:, :, None, :]
    else:
        o_g, m = o_g[:, :, None, None] + tl.arange(0, 2)[None, None, None, :], m[:, :, None, None]
        if side.PER * side.WORDS > side.DIM:
            m = m & (o_g * side.CHANNELS < side.DIM)
        b_x = entries_at(table, o_table[None, :, None, None] + o_g * table.d, m)
    return b_x


@triton.jit
def scaled_weights(b_p, b_t, c):
    """Weights [1, keys, rows, 1] times entries of groups, for products, in one bfloat16 part or two. One,
    beside entries of bfloat16 on NVIDIA, is rounded before and after: half of the instructions."""
    SHAPE: tl.constexpr = [b_t.shape[0], b_t.shape[1], b_p.shape[2], 2]
    COLUMNS: tl.constexpr = 2 * SHAPE[2]
    if c.PARTS == 1 and c.PTX and b_t.dtype == tl.bfloat16:
        b_p, b_t = tl.broadcast_to(b_p.to(tl.bfloat16), SHAPE), tl.broadcast_to(b_t, SHAPE)
        b_high = multiply_add(b_p, b_t, tl.full(SHAPE, -0.0, tl.bfloat16))
        b_low = b_high
    elif c.PARTS == 1:
        b_high = (b_p * b_t).to(tl.bfloat16)
        b_low = b_high
    elif c.PTX:
        b_high, b_low = halves(b_p * b_t)
    else:
        b_high, b_low, _ = parts_of(b_p * b_t, 2, False)
    return b_high.reshape(SHAPE[0], SHAPE[1], COLUMNS), b_low.reshape(SHAPE[0], SHAPE[1], COLUMNS)


@triton.jit
def of_parts(b_v, b_parts, acc, c):
    """acc + v @ x of x in as many parts as `scaled_weights` makes."""
    if c.PARTS > 1:
        acc = tl.dot(b_v, b_parts[1], acc)
    return tl.dot(b_v, b_parts[0], acc)


@triton.jit
def of_own_group(acc):
    """[rows, words] of sums [pairs of groups, 16 words, rows by either group of the pair]."""
    PAIRS: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[2] // 2
    o_g = tl.arange(0, 2)
    m = o_g[None, :, None, None, None] == o_g[None, None, None, None, :]
    acc = tl.sum(tl.where(m, acc.reshape(PAIRS, 2, 8, ROWS, 2), 0.0), 4)
    return tl.trans(acc.reshape(PAIRS * 16, ROWS))


@triton.constexpr_function
def holds(table: Any, codes: str, shift: str) -> bool:
    """Does bfloat16 hold codes times their scales? Those of mxfp4 are powers of two."""
    return codes == "mxfp4" and shift == "" and table == tl.bfloat16


@triton.constexpr_function
def divides(parts: int, codes: str) -> bool:
    """Are values in two parts where queries are? Not infinite ones: times a part of 0 they would be NaN."""
    return parts == 2 and codes != "fp8_e5m2"


@triton.constexpr_function
def groups_of(per: int, words: int, channels: int) -> int:
    """Into how many groups that share a scale whole words fall; 0: they do not."""
    whole = channels >= per and channels & (channels - 1) == 0 and channels <= per * words
    return per * words // channels if whole else 0


@triton.jit
def values(b_x, keys, scale, shift, CLASS: tl.constexpr, side, LAID: tl.constexpr, rows, place, t, c):
    """A tile of codes times its scales and with its shifts, one by one; LAID: of words by keys."""
    b_t = of_elements(keys, scale, side.TOKENS, side.CHANNELS, CLASS, side, rows, place, t, c)
    b_scale = tl.trans(b_t) if LAID else b_t
    b_x = b_x.to(tl.float32)
    if shift is not None:
        b_t = of_elements(keys, shift, side.SHIFT_TOKENS, side.SHIFT_CHANNELS, CLASS, side, rows, place, t, c)
        b_x = tl.fma(b_x, b_scale, tl.trans(b_t) if LAID else b_t)
    else:
        b_x = b_x * b_scale
    return b_x


@triton.jit
def rounded_values(b_x, keys, scale, shift, CLASS: tl.constexpr, side, LAID: tl.constexpr, rows, place, t, c):
    """`values` in bfloat16, scales and shifts too: a third of the instructions."""
    b_t = of_elements(keys, scale, side.TOKENS, side.CHANNELS, CLASS, side, rows, place, t, c).to(tl.bfloat16)
    b_scale = tl.trans(b_t) if LAID else b_t
    b_shift = tl.full(b_x.shape, -0.0, tl.bfloat16)
    if shift is not None:
        b_t = of_elements(keys, shift, side.SHIFT_TOKENS, side.SHIFT_CHANNELS, CLASS, side, rows, place, t, c)
        b_t = b_t.to(tl.bfloat16)
        b_shift = tl.trans(b_t) if LAID else b_t
    return multiply_add(b_x, b_scale, b_shift)


@triton.jit
def classes(b_x, PER: tl.constexpr):
    """The classes of channels of a tile [rows, PER·words]; two of them twice if there are no four."""
    WORDS: tl.constexpr = b_x.shape[1] // PER
    if PER > 2:
        b_even, b_odd = b_x.reshape(b_x.shape[0], WORDS, 2, 2).split()
        b_0, b_2 = b_even.split()
        b_1, b_3 = b_odd.split()
    else:
        b_0, b_1 = b_x.reshape(b_x.shape[0], WORDS, 2).split()
        b_2, b_3 = b_0, b_1
    return b_0, b_1, b_2, b_3


@triton.jit
def of_all_classes(b_w, CODES: tl.constexpr, PER: tl.constexpr, PTX: tl.constexpr, TIMES: tl.constexpr):
    """The codes of words [keys, words] class by class, once or twice."""
    b_0, b_1 = decoded(b_w, 0, CODES, PTX), decoded(b_w, 1, CODES, PTX)
    if PER > 2:
        b_2, b_3 = decoded(b_w, 2, CODES, PTX), decoded(b_w, 3, CODES, PTX)
        b_x = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))
        if TIMES == 2:
            b_x = tl.join(b_x, b_x).permute(0, 2, 3, 4, 1)
        else:
            b_x = b_x.permute(0, 2, 3, 1)
    else:
        b_x = tl.join(b_0, b_1)
        if TIMES == 2:
            b_x = tl.join(b_x, b_x).permute(0, 2, 3, 1)
        else:
            b_x = b_x.permute(0, 2, 1)
    return b_x.reshape(b_w.shape[0], TIMES * PER * b_w.shape[1])


@triton.jit
def product_of_halves(b_x, b_scale, b_w, CODES: tl.constexpr, PER: tl.constexpr, c):
    """(x·scale) @ kᵀ of rows x, as two bfloat16, and the codes of words: one TURNED product. Of 8 rows the
    halves stand one behind the other along the channels, of 4 rows beside each other as columns."""
    b_scale = tl.broadcast_to(b_scale[None, :], b_x.shape)
    if c.PTX and b_x.dtype == tl.bfloat16 and b_scale.dtype == tl.bfloat16:
        b_high, b_low = product_halves(b_x, b_scale)
    elif c.PTX:
        b_high, b_low = halves(b_x.to(tl.float32) * b_scale)
    else:
        b_high, b_low, _ = parts_of(b_x.to(tl.float32) * b_scale, 2, False)
    ROWS: tl.constexpr = b_x.shape[0]
    CHANNELS: tl.constexpr = b_x.shape[1]
    KEYS: tl.constexpr = b_w.shape[0]
    if ROWS < 8:
        b_k = of_all_classes(b_w, CODES, PER, c.PTX, 1)
        b_y = tl.join(b_low, b_high).reshape(ROWS, CHANNELS // PER, PER, 2).permute(0, 3, 2, 1)
        b_s = tl.dot(b_k, tl.trans(b_y.reshape(2 * ROWS, CHANNELS)))
        b_s = tl.sum(b_s.reshape(KEYS, ROWS, 2), 2)
    else:
        b_k = of_all_classes(b_w, CODES, PER, c.PTX, 2)
        b_y = tl.join(b_low, b_high).reshape(ROWS, CHANNELS // PER, PER, 2).permute(0, 2, 3, 1)
        b_s = tl.dot(b_k, tl.trans(b_y.reshape(ROWS, 2 * CHANNELS)))
    return tl.trans(b_s)


@triton.jit
def of_channels(j_0, table, TOKENS: tl.constexpr, side, rows, place, t, c):
    """The entries of all channels for the block from key j_0 on, all of whose keys have the same."""
    o_table = table_rows(j_0, table, TOKENS, rows, place, t, c)
    if paired(table.p.dtype.element_ty, side.PER * side.WORDS, side.DIM, 1):
        o_d = 2 * tl.arange(0, side.PER * side.WORDS // 2)
        b_x = pairs_at(table, o_table + o_d, o_d < side.DIM).reshape(side.PER * side.WORDS)
    else:
        o_d = tl.arange(0, side.PER * side.WORDS)
        b_x = entries_at(table, o_table + o_d * table.d, o_d < side.DIM)
    return b_x


@triton.jit
def summed(b_x, sums, alpha, c):
    """Older sums of rows times alpha, and those of a tile: of TURNED ones each of every 32nd key, as threads
    hold them, to be added up behind the last block."""
    if c.TURNED:
        LATE: tl.constexpr = sums.shape[1]
        b_x = tl.sum(b_x.reshape(b_x.shape[0], b_x.shape[1] // LATE, LATE), 1)
        sums = tl.fma(sums, tl.broadcast_to(alpha[:, None], sums.shape), b_x)
    else:
        sums = sums * alpha + tl.sum(b_x, 1)
    return sums


@triton.jit
def ones(b_x):
    return tl.where(b_x, 1.0, 0.0).to(tl.bfloat16)
