"""The operands of products of codes, as rows and keys of floats; attention whose weights are codes too."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from polyflash.quant import QuantizedTensor
from polyflash.quant.codec import spread
from polyflash.quant.scheme import KINDS

LOG2E, LN2 = math.log2(math.e), math.log(2.0)


def query_codes(q: Tensor, kind: str = "int8") -> tuple[Tensor, Tensor]:
    """Codes of every row of q, and what they are multiples of."""
    most = KINDS[kind].most
    top = q.float().abs().amax(-1, keepdim=True).clamp(min=1e-35)
    units = q.float() * (torch.full_like(top, most) / top)  # most / top would round twice
    codes = units.round() if kind == "int8" else units.to(torch.float8_e4m3fn).float()
    return codes, top / most


def operands(q: Tensor, k: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Float64 rows and keys whose products are scores before their scale: codes beside codes, and behind
    them q as it is beside a mean of k."""
    codes, scale = query_codes(q, k.form.dtype)
    plain = spread(k.scale.double(), k.form.scale, k.codes.shape) * k.codes.double()
    left, right = [codes.double() * scale.double()], [plain]
    if k.shift is not None:
        left.append(q.double())
        right.append(spread(k.shift.double(), k.form.shift, k.codes.shape).expand_as(plain))
    return torch.cat(left, -1), torch.cat(right, -1)


def with_coded_weights(
    s: Tensor,
    v: QuantizedTensor,
    *,
    block: int,
    slack: float = 0.0,
    rising: bool = True,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse in float64 of scores (batch, heads, rows, keys), -inf where hidden, in blocks of so many
    keys from the first on or from the last: weights are e4m3 of 448·exp(s - m), m the largest score so far or
    up to `slack` powers of two below, and their sum is that of unrounded ones. v has a scale per head."""
    group = s.shape[1] // v.codes.shape[1]
    codes, v_scale = (x.double().repeat_interleave(group, 1) for x in (v.codes, v.scale))
    odd = (s > -math.inf).double() @ codes.isnan().double() > 0  # NaN reaches the rows that see it
    codes = codes.nan_to_num()
    s = s.double() * LOG2E
    low = torch.full_like(s[..., :1], -torch.finfo(torch.float32).max)
    m, total, acc = low, torch.zeros_like(low), s.new_zeros(*s.shape[:3], codes.shape[3])
    starts = range(0, codes.shape[2], block)
    for j in starts if rising else reversed(starts):
        some = s[..., j : j + block]
        top = some.amax(-1, keepdim=True) - math.log2(KINDS["fp8_e4m3"].most)
        new = torch.where(top > m, top + slack, m) if slack else torch.maximum(m, top)
        p, alpha = torch.exp2(some - new), torch.exp2(m - new)
        m, total = new, total * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p.float().to(torch.float8_e4m3fn).double() @ codes[:, :, j : j + block]
    lse = (m * LN2 + total.log())[..., 0]
    out = acc * v_scale / torch.where(total == 0, 1, total)
    if sinks is not None:
        both = torch.logaddexp(lse, sinks.double()[:, None])
        out, lse = out * (lse - both).exp().nan_to_num()[..., None], both
    return out.masked_fill(odd, math.nan), lse


def scattered(x: QuantizedTensor, step: int) -> QuantizedTensor:
    """The same codes, whose tables begin with an odd entry, have an odd number from row to row, and entries
    `step` apart, among NaNs."""

    def moved(table: Tensor | None) -> Tensor | None:
        if table is None:
            return None
        *sizes, width = table.shape
        room = torch.full((*sizes, 2 * step * width + 3), torch.nan, dtype=table.dtype, device=table.device)
        return room[..., 1::step][..., :width].copy_(table)

    return replace(x, scale=moved(x.scale), shift=moved(x.shift))
