"""Attention as integer products compute it, in torch: the codes of q and of the weights, block by block."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyflash.quant import QuantizedTensor
from tests.integers import operands
from tests.tolerance import Expected, expect, masked_scores

LOG2E = math.log2(math.e)


def emulated(
    q: Tensor, k: QuantizedTensor, v: QuantizedTensor, block_n: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """out and lse in float64 of the codes; `options` as `masked_scores` takes them, and sinks."""
    group = q.shape[1] // k.codes.shape[1]
    options = {"scale": q.shape[3] ** -0.5, **options}
    s = masked_scores(*operands(q, k), "", options) * LOG2E
    channels = v.form.scale == (0, 1)
    of_key = torch.ones_like(v.scale[..., :1, :1]) if channels else v.scale
    of_key = of_key.expand(*v.codes.shape[:3], 1).double().repeat_interleave(group, 1).mT
    v_codes = v.codes.double().repeat_interleave(group, 1)
    m = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    total, out = torch.zeros_like(m), torch.zeros(*s.shape[:3], v.codes.shape[3], dtype=torch.float64)
    for n in range(0, s.shape[3], block_n):
        here = slice(n, n + block_n)
        part, by = s[..., here], of_key[..., here]
        top = part.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        most = torch.where(part > -torch.inf, by, 0).amax(-1, keepdim=True).clamp(min=2.0**-110)
        x = weights(top - part)
        beta = torch.exp2(top - m)
        total += beta * x.sum(-1, keepdim=True) / 32767
        out += beta * most / 255 * (codes(x, by, most) @ v_codes[:, :, here])
    if options.get("sinks") is not None:
        sinks = options["sinks"].double().view(1, -1, 1, 1) * LOG2E
        total = torch.where(total > 0, total + torch.exp2(sinks - m), total)
    out = torch.where(total > 0, out / total, 0)
    if channels:
        out = out * v.scale.double().repeat_interleave(group, 1)
    return out, ((m + torch.log2(total)) / LOG2E)[..., 0]


def weights(far: Tensor) -> Tensor:
    """2**-far in 32767ths: the exponent is rounded to a 64th."""
    steps = (far * 64 + 0.5).floor().clamp(max=32768).long()
    table = torch.tensor([round(32767 * 2 ** (-j / 64)) for j in range(64)])
    return (table[steps % 64] >> (steps // 64).clamp(max=15)).double() * (steps < 1024)


def codes(x: Tensor, by: Tensor, most: Tensor) -> Tensor:
    """Bytes of weights x times V's scales `by`, these as parts of the largest."""
    parts = (by.float() * (65282 / most.float())).round().clamp(max=65535).double()
    return (((x * parts / 65536).floor() + 64) / 128).floor()


def expected(
    q: Tensor, k: QuantizedTensor, v: QuantizedTensor, block_n: int, **options: Any
) -> tuple[Expected, Expected]:
    """What is emulated with the errors that eager operations in q's dtype make over the values of the codes;
    and those values' own."""
    exact = expect(q, k.values(q.dtype), v.values(q.dtype), **options)
    out, lse = emulated(q, k, v, block_n, **options)
    eager = tuple((out + a - exact.out, lse + b - exact.lse) for a, b in exact.eager)
    return Expected(out, lse, eager, q.dtype), exact
