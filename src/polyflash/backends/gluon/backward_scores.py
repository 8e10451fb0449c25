"""Scores of a block of gradients on Hopper, [keys, rows], made anew as exponents of 2: capped, and less what
distance costs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from polyflash.backends.gluon.places import load_own
from polyflash.backends.gluon.schedule import ROWS
from polyflash.backends.gluon.scores import LOG2E, tanh
from polyflash.backends.gluon.shim import accumulator, lower_by_distance, reciprocal


@gluon.jit
def slope_of(i_h, own, t, n, c):
    """Cost of a step of distance to query head i_h, in exponents of 2."""
    slope = 0.0
    if c.ALIBI:
        p = t.slopes.p + i_h * t.slopes.h + own.i_b.to(gl.int64) * t.slopes.b
        slope = load_own(p, own.i_b, n, c).to(gl.float32) * LOG2E
    return slope


@gluon.jit
def change_scores(b_s, b_less, j_0, step, own, n, c):
    """Exponents of the weights of products with 64 keys from j_0 on, and what `through_cap` needs: of a LARGE
    cap the capped score over it, tanh(x); of others, whose error near 0 does not show, 1 / (1 + exp(2x)),
    which is half of 1 - tanh(x)."""
    b_cap = b_s
    if c.SOFTCAP:
        b_cap = b_s * n.into_cap
        if c.LARGE_CAP:
            b_cap = tanh(b_cap)
        else:
            b_cap = reciprocal(gl.exp2(b_cap) + 1.0)
            b_less = gl.fma(n.factor, -0.5, b_less)
    b_x = gl.fma(b_cap, n.factor, b_less[None, :])
    if c.ALIBI:
        tile: gl.constexpr = accumulator(64)
        o_n = gl.arange(0, 64, layout=gl.SliceLayout(1, tile))
        of_thread = gl.arange(0, 64, layout=gl.SliceLayout(0, tile)) & 6
        b_steps = (step.i_m * ROWS + own.position - j_0 - o_n)[:, None] + of_thread[None, :]
        b_x = lower_by_distance(b_x, b_steps.to(gl.float32) + own.rest, -step.slope)
    return b_x, b_cap


@gluon.jit
def through_cap(b_p, b_cap, c):
    """Weights times the slope of the cap, 1 - tanh²: what dp is multiplied with."""
    if c.LARGE_CAP:
        b_p = b_p * gl.fma(-b_cap, b_cap, 1.0)
    elif c.SOFTCAP:
        b_p = b_p * 4.0 * gl.fma(-b_cap, b_cap, b_cap)
    return b_p
