"""Products of all channels of a head, sums of the output, and how it leaves. Boxes and products have
powers of two, so it is a tuple of the first D, and with REST of so many more."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from polyflash.backends.gluon.mending import add_nonfinite
from polyflash.backends.gluon.places import store_rows
from polyflash.backends.gluon.shim import accumulator, multiply_unless_one, store_box, unpacked


@gluon.jit
def no_sums(c):
    found = (gl.zeros([64, c.D], gl.float32, accumulator(c.D)),)
    if c.REST > 0:
        found = found[0], gl.zeros([64, c.REST], gl.float32, accumulator(c.REST))
    return found


@gluon.jit
def scores_of(q, b_k, c):
    """Issues the product of Q and a block of K."""
    b_s = gl.zeros([64, c.BLOCK_N], gl.float32, accumulator(c.BLOCK_N))
    b_s = warpgroup_mma(q[0], b_k[0], b_s, use_acc=False, is_async=True)
    if c.REST > 0:
        b_s = warpgroup_mma(q[1], b_k[1], b_s, is_async=True)
    return b_s


@gluon.jit
def weighted(acc, b_pairs, b_v, c):
    """Issues the product of weights and their block of V."""
    found = (weighted_part(acc[0], b_pairs, b_v[0]),)
    if c.REST > 0:
        found = found[0], weighted_part(acc[1], b_pairs, b_v[1])
    return found


@gluon.jit
def weighted_part(acc, b_pairs, b_v):
    b_p = unpacked(b_pairs, b_v.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(b_p, b_v, acc, is_async=True)


@gluon.jit
def awaited(acc, c):
    """Once all products are complete."""
    if c.REST > 0:
        found = warpgroup_mma_wait(0, [acc[0], acc[1]])
    else:  # one dependence is no tuple
        found = warpgroup_mma_wait(0, [acc[0]])
        found = (found,)
    return found


@gluon.jit
def rescale(acc, alpha, c):
    found = (scaled(acc[0], alpha, c),)
    if c.REST > 0:
        found = found[0], scaled(acc[1], alpha, c)
    return found


@gluon.jit
def scaled(acc, alpha, c):
    b_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))
    COUNT: gl.constexpr = min(acc.shape[1] // 2, 32)
    return multiply_unless_one(acc, b_alpha, COUNT) if c.LAZY else acc * b_alpha[:, None]


@gluon.jit
def store_tile(out, at, i_row, b_out, slot, FROM: gl.constexpr):
    slot.reshape([64, b_out.shape[1]]).store(b_out)
    fence_async_shared()
    store_box(out, [at[0], at[1], i_row, FROM], slot)


@gluon.jit
def finish(acc, out, slot, tile, place, seen, t, n, c, FROM: gl.constexpr, MENDING: gl.constexpr):
    """Writes the output's channels behind FROM. `tile`: what scales it, sums of weights, batch and
    head, first row, and its keys."""
    b_share, l_i, at, i_row, keys = tile
    b_out = acc * gl.convert_layout(b_share, gl.SliceLayout(1, acc.type.layout))[:, None]
    if MENDING:
        of_v = at[0], at[1] // n.group, place.first_k
        b_out = add_nonfinite(b_out, l_i, of_v, keys, seen, t.v_view, c, FROM)
    b_out = b_out.to(out.dtype)
    if not c.PACKED:
        store_tile(out, at, i_row, b_out, slot, FROM)
    elif i_row + 64 <= place.rows:
        store_tile(out, at, place.first_q + i_row, b_out, slot, FROM)
    else:  # the rows behind are another member's
        i_own = place.first_q + i_row
        store_rows(t.out_view, at[1], i_own, b_out, place.rows - i_row, c, FROM)
