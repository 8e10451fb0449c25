"""Attention as integer products compute it, in torch: the codes of q and of the weights, block by block.
`emulated` of many rows, `of_few_rows` of decode over codes in bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyflash.quant import QuantizedTensor
from polyflash.quant.codec import spread
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
    return beside(emulated(q, k, v, block_n, **options), q, k, v, options)


def beside(
    made: tuple[Tensor, Tensor], q: Tensor, k: QuantizedTensor, v: QuantizedTensor, options: dict[str, Any]
) -> tuple[Expected, Expected]:
    """What was made with eager errors, and the values' own."""
    exact, (out, lse) = expect(q, k.values(q.dtype), v.values(q.dtype), **options), made
    eager = tuple((out + a - exact.out, lse + b - exact.lse) for a, b in exact.eager)
    return Expected(out, lse, eager, q.dtype), exact


def of_few_rows(
    q: Tensor, k: QuantizedTensor, v: QuantizedTensor, block_n: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """out and lse in float64: weights times the scales of v are bytes of either sign, per row, block and
    channels that share scales, and their sum is that of themselves."""
    group, options = q.shape[1] // k.codes.shape[1], {"scale": q.shape[3] ** -0.5, **options}
    s = masked_scores(*byte_operands(q, k), "", options)
    m = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    w, plain = torch.exp(s - m), whole(v).repeat_interleave(group, 1)
    total = w.sum(-1, keepdim=True)
    scales, shifts = (
        None if x is None else spread(x.double(), block, v.shape).expand(v.shape).repeat_interleave(group, 1)
        for x, block in ((v.scale, v.form.scale), (v.shift, v.form.shift))
    )
    out = torch.zeros(*s.shape[:3], plain.shape[3], dtype=torch.float64)
    if shifts is not None:
        out += w @ shifts
    for n in range(0, s.shape[3], block_n):
        here = slice(n, n + block_n)
        for sign in (1, -1):
            by = (w[..., here, None] * scales[:, :, None, here] * sign).clamp(min=0)
            unit = by.amax(3, keepdim=True).clamp(min=1e-300) / 255
            out += sign * ((by / unit).round() * unit * plain[:, :, None, here]).sum(3)
    if options.get("sinks") is not None:
        sinks = torch.exp(options["sinks"].double().view(1, -1, 1, 1) - m)
        total = torch.where(total > 0, total + sinks, total)
    return torch.where(total > 0, out / total, 0), (m + torch.log(total))[..., 0]


def whole(x: QuantizedTensor) -> Tensor:
    """The integers of codes."""
    shift = None if x.shift is None else torch.zeros_like(x.shift)
    return replace(x, scale=torch.ones_like(x.scale), shift=shift).values(torch.float64)


def byte_operands(q: Tensor, k: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Rows and keys whose products are scores before their scale. For every run of keys that share scales of
    channels q times these has codes of its own, which meet the keys of the run alone; behind them q as it is
    beside a shift."""
    group, plain = q.shape[1] // k.codes.shape[1], whole(k)
    keys, run = plain.shape[2], plain.shape[2]
    if k.form.scale.channels:
        run = k.form.scale.tokens or keys
    else:
        plain = plain * spread(k.scale.double(), k.form.scale, plain.shape)
    left, right = [], []
    for i, first in enumerate(range(0, keys, run)):
        by = k.scale[:, :, i : i + 1].repeat_interleave(group, 1) if k.form.scale.channels else 1.0
        x = q.float() * by
        top = x.abs().amax(-1, keepdim=True).clamp(min=1e-34)
        codes = (
            x.double() * (torch.full_like(top, 127) / top).double()
        ).round()  # one rounding, as the kernel
        left.append(codes * (top.double() / 127))
        right.append(torch.zeros_like(plain))
        right[-1][:, :, first : first + run] = plain[:, :, first : first + run]
    if k.shift is not None:
        left.append(q.double())
        right.append(spread(k.shift.double(), k.form.shift, plain.shape).expand_as(plain))
    return torch.cat(left, -1), torch.cat(right, -1)


def expected_of_few_rows(
    q: Tensor, k: QuantizedTensor, v: QuantizedTensor, block_n: int, **options: Any
) -> tuple[Expected, Expected]:
    """As `expected`."""
    return beside(of_few_rows(q, k, v, block_n, **options), q, k, v, options)
