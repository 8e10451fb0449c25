"""The online softmax of a consumer's rows on Hopper, and their lse."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from polyflash.backends.gluon.scores import with_sink
from polyflash.backends.gluon.shim import accumulator, folded, pinned, row_max

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
LOWEST: gl.constexpr = gl.constexpr(-3.4028234663852886e38)  # of finite float32: the maximum before any key
SLACK: gl.constexpr = gl.constexpr(8.0)  # powers of two that a lazy m may lie below its row's maximum
SUMS: gl.constexpr = gl.constexpr(8)  # columns of a row's sums, as threads hold them


@gluon.jit
def new_maxima(b_s, m_i, far, factor, c, MENDING: gl.constexpr):
    """m of a block and those before: of factor·s, rounded. It begins at LOWEST, so that hidden scores weigh 0
    and no weight is inf - inf."""
    b_top = row_max(b_s)
    b_top = b_top * gl.where(far, 1.0, factor) if MENDING else b_top * factor
    if c.LAZY:
        slack = SLACK
        if MENDING:
            slack = gl.where(far, 0.0, SLACK)
        m_new = gl.where(b_top > m_i + slack, b_top, m_i)
    else:
        m_new = gl.maximum(m_i, b_top)
    return m_new if c.PINNED != "maxima" else pinned(m_new)


@gluon.jit
def online_softmax(b_s, m_new, m_i, l_i, far, factor, c, MENDING: gl.constexpr):
    """Weights of a block, exp2(factor·s - m), its l, and the factor for older sums. One multiply-add each, so
    all weights of a row have the same factor next to 1, which l has too. In `far` rows m is in units of s
    and leaves it first."""
    sums: gl.constexpr = accumulator(SUMS)
    b_less, b_older = m_new, m_i - m_new
    if MENDING:
        b_s = b_s - gl.where(far, m_new, 0.0)[:, None]
        b_less, b_older = gl.where(far, 0.0, m_new), b_older * gl.where(far, factor, 1.0)
    b_p = gl.exp2(gl.fma(b_s, factor, -b_less[:, None]))
    alpha = gl.exp2(b_older)
    b_sums = folded(b_p, SUMS, sums)
    if c.LATE_SUM:
        b_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, sums))[:, None]
        l_i = gl.fma(l_i, b_alpha, b_sums)
    else:
        l_i = gl.fma(l_i, alpha, gl.convert_layout(gl.sum(b_sums, 1), m_i.type.layout))
    return b_p, l_i, alpha


@gluon.jit
def store_lse(m_i, l_i, at, place, seen, t, n, c, MENDING: gl.constexpr):
    """lse, and what the output is scaled with, 1 / l. A row that saw no key is 0 and -inf, with a sink 0 and
    that."""
    i_bh, o_row = at
    b_m = m_i * gl.where(seen.far, n.factor * LN2, LN2) if MENDING else m_i * LN2
    b_share = 1.0
    if t.sinks is not None:
        b_sink = gl.load(t.sinks + i_bh % n.num_heads).to(gl.float32)
        if c.PACKED:
            b_sink = gl.where(place.i_b < n.members, b_sink, float("-inf"))
        b_m, l_i, b_share = with_sink(b_m, l_i, b_sink)
    b_none = l_i == 0.0
    b_l = gl.where(b_none, 1.0, l_i)
    if t.lse is not None:
        b_lse = gl.where(b_none, float("-inf"), gl.fma(gl.log2(b_l), LN2, b_m))
        p_lse = t.lse + i_bh.to(gl.int64) * n.seqlen_q + o_row
        if c.PACKED:
            p_lse += place.first_q
        gl.store(p_lse, b_lse, mask=o_row < place.rows)
    return b_share / b_l
