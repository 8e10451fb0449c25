"""Gradients with every operand: bias of every broadcast shape, masks, windows, offsets, lengths, dropout."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from polyflash import Mask
from polyflash.workloads import random_mask
from tests.conformance.gradients import checked, cotangents, gradients, hold
from tests.conformance.rows import DTYPES, ints, qkv
from tests.conformance.test_varlen import packed
from tests.tolerance import near, same_bits

FULL = (2, 4, 33, 70)
FORMS = tuple(itertools.product((True, False), repeat=4))
SHAPES = (
    *(tuple(n if kept else 1 for n, kept in zip(FULL, form, strict=True)) for form in FORMS),
    FULL[1:], (4, 1, 70), FULL[2:], (33, 1), (70,), (1,), (),
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_of_every_shape(backend: str, dtype: torch.dtype):
    """B-grad-05, B-grad-06: the gradient of a broadcast bias sums over the broadcast dimensions."""
    q, k, v = qkv(2, (4, 2), 33, 70, 16, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES:
        bias = torch.randn(shape, generator=generator).to(dtype)
        checked(q, k, v, backend=backend, bias=bias, causal=True, label=f"bias {shape}")


@pytest.mark.parametrize("kind", ("float32", "bfloat16", "float16", "float64"))
def test_bias_of_another_dtype(backend: str, kind: str):
    """The gradient has the bias' own dtype; -inf hides and gets 0."""
    q, k, v = qkv(2, (4, 2), 33, 70, 16)
    bias = torch.randn(2, 4, 33, 70, generator=torch.Generator().manual_seed(2)).to(getattr(torch, kind))
    hidden = torch.rand(bias.shape, generator=torch.Generator().manual_seed(3)) < 0.2
    hidden[0, 0, 5] = True
    got = checked(q, k, v, backend=backend, bias=bias.masked_fill(hidden, -math.inf))
    assert got["bias"].dtype is bias.dtype and (got["bias"][hidden] == 0).all()


def test_bias_beside_lengths(backend: str):
    """A bias and a gradient of each entry, where entries are computed apart."""
    q, k, v = qkv(3, (4, 2), 33, 70, 16)
    bias = torch.randn(3, 4, 33, 70, generator=torch.Generator().manual_seed(2))
    checked(q, k, v, backend=backend, bias=bias, kv_lens=ints(70, 3, 40), causal=True)


def test_bias_with_any_strides(backend: str):
    """A gradient has its operand's shape, whatever memory the operand shares."""
    q, k, v = qkv(2, (4, 2), 33, 70, 16)
    dout, dlse = cotangents(q, v)
    views = (
        torch.randn(1, 4, 33, 1).expand(2, 4, 33, 70),
        torch.randn(70, 33).T,
        torch.randn(2, 4, 33, 140)[..., ::2],
        torch.randn(4, 2, 33, 70).transpose(0, 1),
    )
    for view in views:
        want = gradients(q, k, v, dout, dlse, backend=backend, bias=view.contiguous())
        got = gradients(q, k, v, dout, dlse, backend=backend, bias=view)
        for name in ("q", "k", "v", "bias"):
            same_bits(got[name].contiguous(), want[name].contiguous(), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_of_every_shape(backend: str, dtype: torch.dtype):
    q, k, v = qkv(2, (4, 2), 33, 70, 16, dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    for shape in SHAPES[:-2]:
        mask = random_mask(shape, generator)
        checked(q, k, v, backend=backend, mask=mask, label=f"mask {shape}")
    checked(q, k, v, backend=backend, mask=random_mask((70,), generator), causal=True, softcap=3.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows(backend: str, dtype: torch.dtype):
    """B-cau-08, B-cau-10: 0, around a tile, beyond everything; with and without causal."""
    sides = ((0, 0), (1, None), (63, 0), (64, 65), (None, 3), (15, 16), (200, 200), (None, None))
    for (left, right), (rows, keys) in itertools.product(sides, ((65, 65), (7, 130), (130, 33))):
        q, k, v = qkv(1, (2, 1), rows, keys, 16, dtype=dtype, seed=keys)
        for causal in (False, True):
            label = f"window {left, right} {rows}x{keys} {causal}"
            checked(q, k, v, backend=backend, window=(left, right), causal=causal, label=label)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offsets_both_ways(backend: str, dtype: torch.dtype):
    """Positions before the first key, among the keys and beyond the last; per request and for all."""
    q, k, v = qkv(2, (4, 2), 40, 70, 16, dtype=dtype)
    for offset in (-60, -40, -39, -7, 0, 1, 29, 30, 31, 69, 70, 100, ints(-50, 45), ints(0, 200)):
        checked(q, k, v, backend=backend, causal=True, q_offset=offset, label=f"offset {offset}")
        checked(q, k, v, backend=backend, window=(9, 4), q_offset=offset, label=f"window, offset {offset}")
    checked(q, k, v, backend=backend, causal="top_left")
    checked(q, k, v, backend=backend, causal="top_left", kv_lens=ints(20, 70))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_and_starts(backend: str, dtype: torch.dtype):
    q, k, v = qkv(3, (4, 2), 40, 129, 16, dtype=dtype)
    for lens, starts in (
        ((0, 1, 129), None),
        ((64, 65, 63), (0, 64, 63)),
        (None, (0, 128, 129)),
        ((16, 17, 1), None),
    ):
        options: dict[str, Any] = {}
        options |= {} if lens is None else {"kv_lens": ints(*lens)}
        options |= {} if starts is None else {"kv_starts": ints(*starts)}
        for causal in (False, True):
            checked(q, k, v, backend=backend, causal=causal, label=f"{lens} {starts} {causal}", **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_segments(backend: str, dtype: torch.dtype):
    """Documents of one row, of a tile and of more; ids that only one side has."""
    q, k, v = qkv(2, (4, 2), 130, 150, 16, dtype=dtype)
    q_ids = torch.stack((torch.arange(130) // 17, torch.arange(130) // 64)).int()
    k_ids = torch.stack((torch.arange(150) // 20, torch.arange(150) // 64 + 1)).int()
    checked(q, k, v, backend=backend, mask=Mask.segments(q_ids, k_ids))
    checked(q, k, v, backend=backend, mask=Mask.segments(q_ids, k_ids) & Mask.causal())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cap", (0.7, 5.0, 50.0, 1e3))
def test_softcap(backend: str, cap: float, dtype: torch.dtype):
    """The derivative 1 - tanh², flat where scores are capped; before the bias."""
    q, k, v = (2 * x for x in qkv(1, (4, 2), 40, 70, 16, dtype=dtype))
    checked(q, k, v, backend=backend, softcap=cap)
    bias = torch.randn(1, 4, 1, 70, generator=torch.Generator().manual_seed(2)).to(dtype)
    checked(q, k, v, backend=backend, softcap=cap, bias=bias, causal=True, label="with a bias")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks(backend: str, dtype: torch.dtype):
    """Small and overwhelming sinks; rows that see no key give the sink dlse alone."""
    q, k, v = qkv(2, (4, 2), 40, 30, 16, dtype=dtype)
    for sinks in (torch.tensor((-50.0, -1.0, 2.0, 9.0)), torch.tensor((-math.inf, 0.0, 0.0, 60.0))):
        checked(q, k, v, backend=backend, sinks=sinks, causal=True, label=f"{sinks}")
        checked(q, k, v, backend=backend, sinks=sinks, kv_lens=ints(30, 0), label=f"lens {sinks}")
        checked(q, k, v, backend=backend, sinks=sinks.to(dtype), label=f"{dtype} {sinks}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alibi(backend: str, dtype: torch.dtype):
    q, k, v = qkv(2, (4, 2), 40, 70, 16, dtype=dtype)
    for slopes in (
        torch.tensor((0.5, 0.25, 0.0, 1.0)),
        torch.rand(2, 4),
        torch.tensor((-0.1, 0.0, 3.0, 0.01)),
    ):
        checked(q, k, v, backend=backend, alibi_slopes=slopes, causal=True, label=f"{slopes.shape}")
        checked(
            q, k, v, backend=backend, alibi_slopes=slopes, kv_lens=ints(70, 9), label=f"lens {slopes.shape}"
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", (0.0, -0.2, 0.05, 1.0))
def test_scales(backend: str, scale: float, dtype: torch.dtype):
    """B-q-20: scale 0 is the mean of the values, and dQ = dK = 0."""
    q, k, v = qkv(1, (4, 2), 40, 70, 16, dtype=dtype)
    got = checked(q, k, v, backend=backend, scale=scale, causal=True)
    assert scale or ((got["q"] == 0).all() and (got["k"] == 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout(backend: str, dtype: torch.dtype):
    """B-grad-14: against the oracle's own Philox words, over tiles, groups, batch entries and members."""
    q, k, v = qkv(2, (4, 2), 150, 300, 16, 24, dtype=dtype)
    bias = torch.randn(4, 1, 300, generator=torch.Generator().manual_seed(2)).to(dtype)
    for options in ({}, {"causal": True}, {"bias": bias, "sinks": torch.randn(4)}, {"kv_lens": ints(299, 5)}):
        for rate, seed in ((0.1, 7), (0.6, -(2**63))):
            checked(q, k, v, backend=backend, dropout_p=rate, dropout_seed=seed, label=f"{rate}", **options)
    q, k, v, bounds = packed((17, 5, 64), (40, 9, 130), dtype=dtype)
    checked(q, k, v, backend=backend, dropout_p=0.4, dropout_seed=5, causal=True, **bounds)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_members_with_and_without_rows(backend: str, dtype: torch.dtype):
    """Empty members first, last and in a row; members of one row; tails that belong to nobody."""
    cases = (
        ((0, 17, 0, 0, 64), (9, 0, 0, 5, 130)),
        ((1,) * 20, tuple(range(20))),
        ((65, 1, 33), (64, 1, 129)),
        ((130,), (70,)),
    )
    for rows, keys in cases:
        q, k, v, bounds = packed((*rows, 4), (*keys, 3), heads=(6, 2), dtype=dtype)
        bounds = {name: x[:-1].contiguous() for name, x in bounds.items()}
        for options in ({}, {"causal": True}, {"window": (20, 3)}):
            got = checked(q, k, v, backend=backend, label=f"{rows} {list(options)}", **bounds, **options)
            assert (got["q"][-4:] == 0).all() and (got["k"][-3:] == 0).all() and (got["v"][-3:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_members_are_a_loop(backend: str, dtype: torch.dtype):
    """M27: the gradients of a member are those of the call on it alone."""
    rows, keys = (17, 1, 64, 5), (40, 64, 65, 1)
    q, k, v, bounds = packed(rows, keys, dtype=dtype)
    dout, dlse = cotangents(q, v, packed=True)
    got = gradients(q, k, v, dout, dlse, backend=backend, causal=True, **bounds)
    at, of = (bounds[f"cu_seqlens_{side}"].tolist() for side in "qk")
    for b in range(len(rows)):
        i, j = slice(at[b], at[b + 1]), slice(of[b], of[b + 1])
        one = [x[part].transpose(0, 1)[None] for x, part in ((q, i), (k, j), (v, j), (dout, i))]
        alone = gradients(*one, dlse[None, :, i], backend=backend, causal=True)
        for name, part in (("q", i), ("k", j), ("v", j)):
            scale = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
            near(got[name][part].transpose(0, 1)[None], alone[name], scale, f"member {b} d{name}")


def test_everything_at_once_on_another_layout(backend: str):
    """§3.1 once more with bshd operands, since a layout is only strides below the public function."""
    q, k, v = qkv(2, (4, 2), 33, 70, 16)
    dout, dlse = cotangents(q, v)
    options: dict[str, Any] = {"causal": True, "window": (50, None), "kv_lens": ints(70, 33), "softcap": 9.0}
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    got = gradients(*views, dout, dlse, backend=backend, as_given=True, **options)
    hold(got, q, k, v, dout, dlse, options, "bshd")
