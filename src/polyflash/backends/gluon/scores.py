"""Scores of a block on Hopper before their softmax, and the sink of a head behind it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from polyflash.backends.gluon.shim import reciprocal

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def tanh(b_x):
    """From exp2, exact at 0 and at both ends; relative error of a few units in the last place."""
    b_far = gl.fma(reciprocal(gl.exp2(gl.abs(b_x) * (2 * LOG2E)) + 1.0), -2.0, 1.0)
    b_x2 = b_x * b_x
    # Below, the quotient cancels; x - x³/3 + 2x⁵/15 - 17x⁷/315 + 62x⁹/2835 has what float32 can hold.
    b_near = gl.fma(b_x2, 0.021869488, -0.053968254)
    b_near = gl.fma(gl.fma(b_near, b_x2, 0.13333334), b_x2, -0.33333334)
    b_near = gl.fma(b_near * b_x2, b_x, b_x)
    return gl.where(gl.abs(b_x) < 0.3, b_near, gl.where(b_x < 0.0, -b_far, b_far))


@gluon.jit
def change_scores(b_s, seen, j_0, n, c):
    """Natural scores of products, softcap·tanh(scale·s / softcap) less slope·distance, where calls ask for
    either."""
    if c.SOFTCAP:
        b_s = tanh(b_s * n.into_cap) * n.softcap
    if c.ALIBI:
        b_steps = (seen.at - j_0)[:, None] - seen.col[None, :]
        b_s = b_s if c.SOFTCAP else b_s * n.scale
        b_s = gl.fma(gl.abs(b_steps.to(gl.float32) + seen.rest), -seen.slope, b_s)
    return b_s


@gluon.jit
def with_sink(b_m, l_i, b_sink):
    """Adds the weight of a sink to a row's: the maximum, the sum, and by what the weights of keys shrink. A
    row without keys has the sink alone, as it is."""
    b_m = gl.where(l_i == 0.0, float("-inf"), b_m)
    b_top = gl.maximum(b_m, b_sink)
    b_top = gl.where(b_top == float("-inf"), 0.0, b_top)
    b_share = gl.exp2((b_m - b_top) * LOG2E)
    return b_top, gl.fma(l_i, b_share, gl.exp2((b_sink - b_top) * LOG2E)), b_share
