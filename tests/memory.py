"""Memory harness without vendor tools: poisoned allocations, guard bands, and NaN at everything invisible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.tolerance import members, same_bits, visible

GUARD = 64  # elements before, after and between rows
PATTERN = 1234.0  # finite, unlikely, the same in every float dtype


@contextmanager
def poisoned(on: bool = True) -> Iterator[None]:
    """Every `torch.empty` is filled: NaN in floats, the largest value in integers (torch's own debug
    mode, switched by what imports no compiler)."""
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn" if on else "default")
    torch.utils.deterministic.fill_uninitialized_memory = on
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@dataclass
class Guarded:
    """A tensor inside a larger buffer, `[guard | row gap row gap ... | guard]`; `view` is the tensor."""

    buffer: Tensor
    view: Tensor
    inside: Tensor  # bool, over buffer

    def fill_guards(self, value: float | int | bool) -> None:
        self.buffer[~self.inside] = value

    def assert_intact(self, value: float | int | bool, label: str) -> None:
        guards = self.buffer[~self.inside]
        want = torch.full_like(guards, value)
        same_bits(guards, want, f"{label}: guard overwritten")


def guard(x: Tensor, gap: int = 3) -> Guarded:
    """A copy of `x` (up to 4 dimensions) whose rows have `gap` guard elements behind them, bands around
    all."""
    shape = x.shape
    strides, step = [], 1
    for position, size in enumerate(reversed(shape)):
        strides.append(step)
        step *= size
        step += gap if position < 3 else 0
    strides.reverse()
    buffer = torch.zeros(step + 2 * GUARD, dtype=x.dtype)
    view = buffer.as_strided(shape, strides, GUARD)
    view.copy_(x)
    inside = torch.zeros(buffer.numel(), dtype=torch.bool)
    inside.as_strided(shape, strides, GUARD).fill_(True)
    return Guarded(buffer, view, inside)


def guard_value(dtype: torch.dtype, run: int) -> Any:
    """Run 0: a fixed pattern. Run 1: what must never be read."""
    if dtype is torch.bool:
        return bool(run)
    if dtype.is_floating_point:
        return (PATTERN, math.nan)[run]
    return (0x7F7F7F7F, -0x7F7F7F7F)[run]


def check_guarded(call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    """Run with every tensor in guard bands: guards intact (writes), and equal bits with other guards (reads).

    `call(q, k, v, out=..., **options)` returns (out, lse).
    """
    tensors = {"q": q, "k": k, "v": v, **{n: x for n, x in options.items() if isinstance(x, Tensor)}}
    boxes = {name: guard(x) for name, x in tensors.items()}
    boxes["out"] = guard(torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype))
    others = {n: x for n, x in options.items() if not isinstance(x, Tensor)}
    results = []
    for run in (0, 1):
        for box in boxes.values():
            box.fill_guards(guard_value(box.buffer.dtype, run))
        views = {name: box.view for name, box in boxes.items()}
        result = call(views.pop("q"), views.pop("k"), views.pop("v"), **views, **others)
        results.append([x.clone() for x in result])
        for name, box in boxes.items():
            box.assert_intact(guard_value(box.buffer.dtype, run), f"{name}, run {run}")
        for name, x in tensors.items():
            same_bits(boxes[name].view, x, f"{name} modified")
    for name, a, b in zip(("out", "lse"), *results, strict=True):
        same_bits(a, b, f"{name} read a guard")


FILLS = ("nan", "inf", "65504", "bits")


def nanify(x: Tensor, hidden: Tensor, fill: str, generator: torch.Generator) -> Tensor:
    """A copy of `x` whose `hidden` elements hold NaN, +inf, 65504 or random bits."""
    if fill == "bits":
        raw = torch.randint(0, 256, (x.numel() * x.element_size(),), generator=generator, dtype=torch.uint8)
        other = raw.view(x.dtype).view(x.shape)
    else:
        other = torch.full_like(x, {"nan": math.nan, "inf": math.inf, "65504": 65504.0}[fill])
    return torch.where(hidden, other, x)


def hidden_copies(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], fill: str
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """k, v and options with everything invisible filled: keys no row of their group sees, bias where the
    mask hides."""
    generator = torch.Generator().manual_seed(1)
    seen = visible(q, k, **options)
    group = q.shape[1] // k.shape[1]
    keys = ~seen.view(q.shape[0], k.shape[1], group, *seen.shape[2:]).any(2).any(2)[..., None]
    options = dict(options)
    if options.get("bias") is not None:
        bias = options["bias"]
        hidden = ~seen
        for dim in range(hidden.ndim):
            place = dim - hidden.ndim + bias.ndim
            if place < 0 or bias.shape[place] == 1:
                hidden = hidden.all(dim, keepdim=True)
        options["bias"] = nanify(bias, hidden.reshape(bias.shape), fill, generator)
    return nanify(k, keys, fill, generator), nanify(v, keys, fill, generator), options


def hidden_members(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], fill: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed q, k, v with everything invisible filled: rows and keys of nobody, and keys none of their member
    sees."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = q.clone(), k.clone(), v.clone()
    rows, keys = int(options["cu_seqlens_q"][-1]), int(options["cu_seqlens_k"][-1])
    for x, end in ((q, rows), (k, keys), (v, keys)):
        x[end:] = nanify(x[end:], torch.tensor(True), fill, generator)
    for _, of, (one_q, one_k, one_v, own) in members(q, k, v, options):
        k2, v2, _ = hidden_copies(one_q, one_k, one_v, own, fill)
        k[of], v[of] = k2[0].transpose(0, 1), v2[0].transpose(0, 1)
    return q, k, v


def check_hidden(
    call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], fills: Any = FILLS
) -> None:
    """Invisible bits change no output bit. `call(q, k, v, **options)` returns (out, lse)."""
    want = call(q, k, v, **options)
    for fill in fills:
        if "cu_seqlens_q" in options:
            got = call(*hidden_members(q, k, v, options, fill), **options)
        else:
            k2, v2, options2 = hidden_copies(q, k, v, options, fill)
            got = call(q, k2, v2, **options2)
        for name, a, b in zip(("out", "lse"), got, want, strict=True):
            same_bits(a, b, f"{name} with invisible = {fill}")
