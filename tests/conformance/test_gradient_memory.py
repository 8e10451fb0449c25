"""Gradients and memory: what is masked is absent, NaN reaches who sees it, strides change no bit, and nothing
else is written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from polyflash.workloads import make
from tests.catalogue import named, with_dtype
from tests.conformance.gradients import (
    attend,
    cotangents,
    gradients,
    keeps_bits,
    leaves,
    refusal,
    right_gradients,
)
from tests.conformance.rows import DTYPES, NAMES, ROUNDING, ints, qkv
from tests.conformance.test_varlen import packed
from tests.memory import FILLS, guard, guard_value, hidden_copies, hidden_members, nanify
from tests.tolerance import near, same_bits, same_bits_of_strides, same_pattern, visible

HIDDEN = (
    "causal-tall", "causal-top-left", "offset-negative", "offset-per-request", "window", "window-tall",
    "lens-causal", "starts", "ragged-window", "mask-dense", "mask-keys", "mask-rows", "mask-lens-window",
    "bias-keys-causal", "sinks", "segments", "everything", "intervals-heads", "packed-lens",
    "packed-everything",
)  # fmt: skip


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("name", HIDDEN)
def test_invisible_bits(backend: str, name: str, dtype: str):
    """P5, G7: NaN, Inf, 65504 and random bits in K, V and bias where nobody looks, and in dO, dlse and Q of
    rows that see nothing, change no bit of any gradient."""
    _hidden_change_nothing(backend, name, dtype)


@pytest.mark.parametrize("name", ["window", "everything", "packed-everything"])
def test_invisible_bits_in_aligned_tiles(backend: str, name: str):
    """With batch_invariant a tile may reach beyond the rows: what only such rows would see is hidden too."""
    _hidden_change_nothing(backend, name, "float32", batch_invariant=True)


def _hidden_change_nothing(backend: str, name: str, dtype: str, **flags: bool) -> None:
    q, k, v, options = make(with_dtype(named(name), dtype), seed=2)
    options |= flags
    is_packed = "cu_seqlens_q" in options
    dout, dlse = cotangents(q, v, packed=is_packed)
    want = gradients(q, k, v, dout, dlse, backend=backend, **options)
    generator = torch.Generator().manual_seed(6)
    empty = want["lse"] == -math.inf
    for fill in FILLS:
        if is_packed:
            spoiled, rest = hidden_members(q, k, v, options, fill), options
            rows = empty.T
        else:
            k2, v2, rest = hidden_copies(q, k, v, options, fill)
            spoiled, rows = (q, k2, v2), empty
        q2, dout2 = (nanify(x, rows[..., None], fill, generator) for x in (spoiled[0], dout))
        dlse2 = nanify(dlse, empty, fill, generator)
        got = gradients(q2, *spoiled[1:], dout2, dlse2, backend=backend, **rest)
        for n in want:
            finite = n not in ("q", "k", "v") or fill == "65504"
            keeps_bits(backend, got[n], want[n], f"{n} with invisible = {fill}", finite=finite)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_invisible_to_some_rows(backend: str, dtype: torch.dtype):
    """NaN in a key reaches dQ of the rows that see it and dK, dV of the keys those rows see; all other rows
    and keys keep their bits."""
    q, k, v = qkv(2, (4, 2), 70, 130, 32, dtype=dtype)
    dout, dlse = cotangents(q, v)
    generator = torch.Generator().manual_seed(0)
    cases: tuple[dict[str, Any], ...] = (
        {"causal": True},
        {"window": (20, 10)},
        {"mask": torch.rand(2, 4, 70, 130, generator=generator) < 0.05},
        {"kv_lens": ints(130, 70), "causal": True},
    )
    for options in cases:
        want = gradients(q, k, v, dout, dlse, backend=backend, **options)
        seen = visible(q, k, **options)
        for key in (0, 64, 129):
            at = (torch.arange(130) == key)[:, None]
            rows = seen[..., key]
            keys = (seen & rows[..., None]).unflatten(1, (2, 2)).any(2).any(2)
            for which in "kv":
                spoiled = {"k": k, "v": v, which: nanify(k if which == "k" else v, at, "nan", generator)}
                got = gradients(q, spoiled["k"], spoiled["v"], dout, dlse, backend=backend, **options)
                label = f"{list(options)} {which} of key {key}"
                keeps_bits(backend, got["q"][~rows], want["q"][~rows], f"{label}: dq")
                assert got["q"][rows].isnan().all(), f"{label}: dq"
                for n in "kv":
                    keeps_bits(backend, got[n][~keys], want[n][~keys], f"{label}: d{n}")
                assert got["k"][keys].isnan().all(), f"{label}: dk"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ("q", "k", "v", "dlse"))
def test_visible_nan(backend: str, which: str, dtype: torch.dtype):
    """P6: one NaN in an operand or in dlse; the pattern is the oracle's, the rest stays near."""
    for options in (
        {"causal": True},
        {"kv_lens": ints(70)},
        {"mask": torch.ones(1, 1, 40, 70).tril(5).bool()},
    ):
        given = dict(zip("qkv", qkv(1, (4, 2), 40, 70, 32, dtype=dtype), strict=True))
        given["dout"], given["dlse"] = cotangents(given["q"], given["v"])
        clean = gradients(**given, backend=backend, **options)
        row, head = given[which].shape[2] // 2, 1
        given[which] = given[which].clone()
        given[which][(0, head, row) if which == "dlse" else (0, head, row, 3)] = math.nan
        got = gradients(**given, backend=backend, **options)
        right = right_gradients(**given, options=options)
        for n in "qkv":
            same_pattern(got[n], right[n].to(dtype), f"{list(options)} NaN in {which}: d{n}")
            finite = right[n].isfinite()
            near(got[n][finite], clean[n][finite], ROUNDING[dtype], f"NaN in {which}: d{n}")


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_cotangent(backend: str, dtype: torch.dtype, value: float):
    """NaN or infinity in dO reaches dQ of its row, dK of keys the row sees and one channel of their dV; all
    else keeps its bits."""
    q, k, v = qkv(1, (4, 2), 40, 70, 32, dtype=dtype)
    dout, dlse = cotangents(q, v)
    bad = dout.clone()
    bad[0, 3, 20, 5] = value
    for options in ({"causal": True}, {}, {"window": (7, 0)}):
        want = gradients(q, k, v, dout, dlse, backend=backend, **options)
        got = gradients(q, k, v, bad, dlse, backend=backend, **options)
        rows = torch.zeros(1, 4, 40, dtype=torch.bool)
        rows[0, 3, 20] = True
        keys = torch.zeros(1, 2, 70, dtype=torch.bool)
        keys[0, 1] = visible(q, k, **options)[0, 3, 20]
        keeps_bits(backend, got["q"][~rows], want["q"][~rows], "dq")
        assert not got["q"][rows].isfinite().any()
        for n in "kv":
            keeps_bits(backend, got[n][~keys], want[n][~keys], f"d{n}")
        assert not got["k"][keys].isfinite().any() and not got["v"][keys][:, 5].isfinite().any()
        others = torch.arange(32) != 5
        near(got["v"][keys][:, others], want["v"][keys][:, others], ROUNDING[dtype])


LAYOUTS: dict[str, Any] = {
    "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "packed qkv": lambda x: torch.stack((x, x * 0 + 7, x), 3)[..., 2, :],
    "stride 2": lambda x: torch.stack((x, torch.full_like(x, 5)), -1)[..., 0],
    "offset": lambda x: torch.zeros(x.numel() + 7, dtype=x.dtype)[7:].view(x.shape).copy_(x),
    "reversed order": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "rows apart": lambda x: torch.cat((x, torch.full_like(x, math.nan)), -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_M28_M29_strides_change_no_bit(backend: str, layout: str, dtype: torch.dtype):
    """B-str-01 to B-str-03, B-str-09, B-str-11, B-str-13: q, k, v and dout in any memory."""
    for options in ({"causal": True}, {"kv_lens": ints(70, 33), "window": (20, 3)}):
        q, k, v = qkv(2, (4, 2), 40, 70, 24, 40, dtype=dtype)
        dout, dlse = cotangents(q, v)
        want = gradients(q, k, v, dout, dlse, backend=backend, **options)
        turned = [LAYOUTS[layout](x) for x in (q, k, v, dout)]
        got = gradients(*turned, dlse, backend=backend, as_given=True, **options)
        for n in want:
            same_bits_of_strides(got[n], want[n], f"{n} from {layout}")
        one = gradients(
            q, k, v, turned[3], dlse.transpose(1, 2).contiguous().transpose(1, 2), backend=backend, **options
        )
        for n in "qkv":
            same_bits_of_strides(one[n], want[n], f"{n} from dout {layout}")


def test_B_str_10_expanded_operands(backend: str):
    """Stride 0 in K, V, dout and dlse equals what is written out; the gradient of each entry is its own."""
    q, k, v = qkv(3, (4, 2), 20, 70, 16)
    k, v = (x[:1].expand(3, -1, -1, -1) for x in (k, v))
    one_dout, one_dlse = cotangents(q[:, :, :1], v)
    dout, dlse = one_dout.expand(3, 4, 20, 16), one_dlse.expand(3, 4, 20)
    got = gradients(q, k, v, dout, dlse, backend=backend, as_given=True, causal=True)
    want = gradients(q, *(x.contiguous() for x in (k, v, dout, dlse)), backend=backend, causal=True)
    for n in "qkv":
        same_bits(got[n], want[n], n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_M1_M2_permutations(backend: str, dtype: torch.dtype):
    """Entries and key/value groups in another order: the same bits in that order."""
    q, k, v = qkv(3, (6, 2), 40, 70, 24, dtype=dtype)
    dout, dlse = cotangents(q, v)
    order = torch.tensor((2, 0, 1))
    for options in ({}, {"causal": True}, {"window": (30, 5)}):
        want = gradients(q, k, v, dout, dlse, backend=backend, **options)
        got = gradients(*(x[order] for x in (q, k, v, dout, dlse)), backend=backend, **options)
        for n in "qkv":
            same_bits(got[n], want[n][order], f"M1 {n}")
        turned = [x.unflatten(1, (2, -1)).flip(1).flatten(1, 2) for x in (q, k, v, dout, dlse)]
        got = gradients(*turned, backend=backend, **options)
        for n in "qkv":
            same_bits(got[n], want[n].unflatten(1, (2, -1)).flip(1).flatten(1, 2), f"M2 {n}")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_M6_M7_M8_powers_of_two(backend: str, dtype: torch.dtype):
    """q·2ᵃ, k·2⁻ᵃ; -q, -k; v·2ᵃ: gradients scale exactly."""
    q, k, v = qkv(1, (4, 2), 40, 70, 24, dtype=dtype)
    k = torch.where(k.abs() < 1e-2, 1e-2, k)
    dout, _ = cotangents(q, v)
    want = gradients(q, k, v, dout, backend=backend)
    for a, b, c in ((4.0, 0.25, 1.0), (-1.0, -1.0, 1.0), (1.0, 1.0, -8.0)):
        got = gradients(q * a, k * b, v * c, dout, backend=backend)
        same_bits(got["q"] * a, want["q"] * c, f"dq {a, b, c}")
        same_bits(got["k"] * b, want["k"] * c, f"dk {a, b, c}")
        same_bits(got["v"], want["v"], f"dv {a, b, c}")


def test_guard_bands(backend: str):
    """Guards around every operand and cotangent are neither read nor written; operands stay as they are."""
    for name in (
        "self",
        "causal-tall",
        "ragged-window",
        "mask-keys",
        "everything",
        "dim-v-larger",
        "packed-causal",
    ):
        q, k, v, options = make(named(name), seed=1)
        dout, dlse = cotangents(q, v, packed="cu_seqlens_q" in options)
        if refusal(q, k, v, backend=backend, **options):
            continue
        tensors = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse}
        tensors |= {n: x for n, x in options.items() if isinstance(x, Tensor)}
        boxes = {n: guard(x) for n, x in tensors.items()}
        results = []
        for run in (0, 1):
            for box in boxes.values():
                box.fill_guards(guard_value(box.buffer.dtype, run))
            views = {n: box.view for n, box in boxes.items()}
            leaf = {n: views[n].detach().requires_grad_() for n in leaves(q, k, v, options)}
            rest = {**options, **{n: x for n, x in views.items() if n in options}, **leaf}
            out, lse = attend(**rest, backend=backend)
            found = torch.autograd.grad((out, lse), tuple(leaf.values()), (views["dout"], views["dlse"]))
            results.append([x.clone() for x in found])
            for n, box in boxes.items():
                box.assert_intact(guard_value(box.buffer.dtype, run), f"{name}: {n}, run {run}")
                same_bits(box.view, tensors[n], f"{name}: {n} modified")
        for a, b in zip(*results, strict=True):
            same_bits(a, b, f"{name} read a guard")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gradient_written(backend: str, dtype: torch.dtype):
    """P3, P7, B-emp-02, B-emp-03: poisoned memory; rows and keys without work are 0, not as allocated."""
    q, k, v = qkv(3, (4, 2), 70, 200, 16, dtype=dtype)
    dout, dlse = cotangents(q, v)
    for options in (
        {"kv_lens": ints(0, 3, 200)},
        {"window": (1, 1), "q_offset": ints(-300, 500, 90)},
        {"causal": True, "q_offset": -60},
        {"mask": torch.zeros(200, dtype=torch.bool)},
    ):
        got = gradients(q, k, v, dout, dlse, backend=backend, **options)
        seen = visible(q, k, **options)
        for n, some in (("q", seen.any(-1)), ("k", seen.unflatten(1, (2, 2)).any(2).any(2))):
            for name in "q" if n == "q" else "kv":
                assert got[name].isfinite().all() and (got[name][~some] == 0).all(), (list(options), name)


def test_members_do_not_meet(backend: str):
    """NaN in one member, cotangents included, leaves every bit of the others' gradients."""
    q, k, v, bounds = packed((17, 3, 64, 16), (40, 7, 130, 16))
    dout, dlse = cotangents(q, v, packed=True)
    want = gradients(q, k, v, dout, dlse, backend=backend, causal=True, **bounds)
    at, of = (bounds[f"cu_seqlens_{side}"].tolist() for side in "qk")
    for b in range(4):
        bad = [x.clone() for x in (q, k, v, dout, dlse.T.contiguous())]
        for x, ends in zip(bad, (at, of, of, at, at), strict=True):
            x[ends[b] : ends[b + 1]] = math.nan
        got = gradients(*bad[:4], bad[4].T, backend=backend, causal=True, **bounds)
        for n, ends in (("q", at), ("k", of), ("v", of)):
            others = torch.ones(len(got[n]), dtype=torch.bool)
            others[ends[b] : ends[b + 1]] = False
            keeps_bits(backend, got[n][others], want[n][others], f"member {b} d{n}")
