"""The operands of products of integers, as rows and keys of floats."""

from __future__ import annotations

import torch
from torch import Tensor

from polyflash.quant import QuantizedTensor
from polyflash.quant.codec import spread


def query_codes(q: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of every row of q, and what they are multiples of."""
    top = q.float().abs().amax(-1, keepdim=True).clamp(min=1e-35)
    inverse = torch.full_like(top, 127.0) / top  # 127 / top would round twice
    return (q.float() * inverse).round(), top / 127


def operands(q: Tensor, k: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Float64 rows and keys whose products are scores before their scale: codes beside codes, and behind
    them q as it is beside a mean of k."""
    codes, scale = query_codes(q)
    plain = spread(k.scale.double(), k.form.scale, k.codes.shape) * k.codes.double()
    left, right = [codes.double() * scale.double()], [plain]
    if k.shift is not None:
        left.append(q.double())
        right.append(spread(k.shift.double(), k.form.shift, k.codes.shape).expand_as(plain))
    return torch.cat(left, -1), torch.cat(right, -1)
