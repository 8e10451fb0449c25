"""Drawn problems (testing method §3.9): every row that accepts a case runs it, against the oracle and
pairwise.

Hypothesis draws lengths, ratios, dims, options, layout, dtype and family; the profile is in
tests/conftest.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import polyflash
from polyflash.workloads import Workload, make
from tests.conformance.rows import FORWARD, HEAD_DIMS, Runner
from tests.conformance.test_gradients import gradients, hold
from tests.tolerance import check, expect, near, relative_l2

LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 3, 11, 53, 101, 199, 509, 1097)
FAMILIES = (
    "normal", "x4", "x10", "kbias", "qkbias", "kscale", "sparse", "sharp", "vbias", "sink", "rising",
    "falling",
    "equal", "zeros", "onehot", "alternating", "nanrow",
)  # fmt: skip
LAYOUTS = ("bhsd", "bshd", "packed", "stride 2", "offset", "reversed order")


@st.composite
def problems(draw: st.DrawFn) -> tuple[Workload, str, str, int]:
    """A workload, an input family, a storage layout and a seed."""
    batch, kv_heads = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    group = draw(st.sampled_from((1, 2, 3, 5, 7, 8)))
    rows, keys = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    if batch * kv_heads * group * rows * keys > 2**20:
        batch, kv_heads = min(batch, 1), 1
    sides = st.none() | st.integers(0, keys + 2)
    lens = st.tuples(*(st.integers(0, keys) for _ in range(batch)))
    kind = draw(
        st.sampled_from(
            ("none", "causal", "window", "both", "lens", "mask", "offset", "bias", "all", "lists")
        )
    )
    some = lambda *kinds: kind in kinds  # noqa: E731
    workload = Workload(
        "drawn",
        frozenset(),
        batch,
        kv_heads * group,
        kv_heads,
        rows,
        keys,
        draw(st.sampled_from(HEAD_DIMS)),
        draw(st.sampled_from((0, *HEAD_DIMS))),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16", "float64"))),
        causal=draw(st.sampled_from((True, "top_left")))
        if some("causal", "both", "offset", "all")
        else False,
        window=draw(st.tuples(sides, sides)) if some("window", "both", "all") else None,
        offset=draw(st.integers(-rows - 3, keys + 3)) if some("offset") else None,
        kv_lens=draw(lens) if some("lens", "all") else None,
        kv_starts=draw(lens) if some("lens", "all") and draw(st.booleans()) else None,
        mask=draw(st.sampled_from(("bhqk", "b11k", "qk", "1h1k", "b1q1", "k")))
        if some("mask", "all")
        else "",
        bias=draw(st.sampled_from(("bhqk", "b11k", "qk", "1h11"))) if some("bias") else "",
        softcap=draw(st.sampled_from((0.0, 4.0))) if some("bias") else 0.0,
        sinks=draw(st.booleans()) if some("bias") else False,
        alibi=draw(st.sampled_from(("", "h", "bh"))) if some("bias") else "",
        scale=draw(st.sampled_from((None, None, 0.0, -0.2, 0.5))),
    )
    return (
        workload,
        draw(st.sampled_from(FAMILIES)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.integers(0, 2**16)),
    )


@st.composite
def listed_problems(draw: st.DrawFn) -> tuple[Workload, str, str, int]:
    """A drawn problem with interval lists in the place of its bool mask."""
    workload, family, layout, seed = draw(problems())
    form = draw(st.sampled_from(("r", "br", "b1r", "1hr", "bhr")))
    form = form[:1].replace("b", "1") + form[1:] if workload.batch == 0 else form
    rows = draw(st.sampled_from((1, 7, 16, 64, 100)))
    return replace(workload, mask="", intervals=form, interval_rows=rows), family, layout, seed


@given(listed_problems())
def test_fuzz_lists(drawn: tuple[Workload, str, str, int]):
    """Interval lists with every other rule a draw may have; 0 for keys that are in no list."""
    workload, family, layout, seed = drawn
    if 0 in (workload.batch, workload.seqlen_k) and family != "nanrow":
        family = "normal"
    q, k, v, options = make(workload, seed=seed, family=family)
    want, ran = None, 0
    for row in FORWARD:
        run = Runner(row)
        if run.reasons(q, k, v, **options):
            continue
        out, lse = run(*(laid_out(x, layout) for x in (q, k, v)), **options)
        want = want or expect(q, k, v, **options)
        check(out, lse, want, label=f"{row.name} {drawn}", options=options)
        ran += 1
    assert ran, f"no row runs {drawn}"


@st.composite
def packed_problems(draw: st.DrawFn) -> tuple[Workload, str, int]:
    """A packed workload, zero members and zero lengths among them, an input family and a seed."""
    lengths = st.sampled_from((0, 0, 1, 1, 2, 15, 16, 17, 31, 33, 64, 65, 129, 3, 53, 199))
    members = tuple(draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=6)))
    kv_heads = draw(st.integers(1, 3))
    rows, keys = (sum(n) + draw(st.sampled_from((0, 0, 3, 70))) for n in zip(*members, strict=True))
    sides = st.none() | st.integers(0, 130)
    kind = draw(st.sampled_from(("none", "causal", "window", "both", "lens", "offset", "rest", "all")))
    lens = st.tuples(*(st.integers(0, n) for _, n in members))
    some = lambda *kinds: kind in (*kinds, "all")  # noqa: E731
    workload = Workload(
        "drawn", frozenset(), 1, kv_heads * draw(st.sampled_from((1, 2, 3, 5, 8))), kv_heads, rows, keys,
        draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from((0, *HEAD_DIMS))), members=members,
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16", "float64"))),
        causal=draw(st.sampled_from((True, "top_left"))) if some("causal", "both", "offset") else False,
        window=draw(st.tuples(sides, sides)) if some("window", "both") else None,
        offset=draw(st.integers(-70, 140)) if kind == "offset" else None,
        kv_lens=draw(lens) if some("lens") else None,
        kv_starts=draw(lens) if some("lens") and draw(st.booleans()) else None,
        softcap=draw(st.sampled_from((0.0, 4.0))) if kind == "rest" else 0.0,
        sinks=draw(st.booleans()) if kind == "rest" else False,
        alibi=draw(st.sampled_from(("", "h", "bh"))) if kind == "rest" else "",
        scale=draw(st.sampled_from((None, None, 0.0, -0.2, 0.5))),
    )  # fmt: skip
    return workload, draw(st.sampled_from(FAMILIES)), draw(st.integers(0, 2**16))


@given(packed_problems())
def test_fuzz_packed(drawn: tuple[Workload, str, int]):
    workload, family, seed = drawn
    if workload.seqlen_k == 0 or workload.seqlen_q == 0:
        family = "normal"
    q, k, v, options = make(workload, seed=seed, family=family)
    want, ran = None, 0
    for row in FORWARD:
        run = Runner(row)
        if run.reasons(q, k, v, **options):
            continue
        out, lse = run(q, k, v, **options)
        want = want or expect(q, k, v, **options)
        check(out, lse, want, label=f"{row.name} {drawn}", options=options)
        ran += 1
    assert ran, f"no row runs {drawn}"


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, stored otherwise; always (batch, heads, seqlen, head_dim)."""
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        return torch.stack((x, x * 0 + 7, x), 3)[..., 2, :]
    if layout == "stride 2":
        return torch.stack((x, torch.full_like(x, 5)), -1)[..., 0]
    if layout == "offset":
        buffer = torch.zeros(x.numel() + 7, dtype=x.dtype)
        return buffer[7:].view(x.shape).copy_(x)
    if layout == "reversed order":
        return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    return x


@given(problems())
def test_fuzz_forward(drawn: tuple[Workload, str, str, int]):
    workload, family, layout, seed = drawn
    if 0 in (workload.batch, workload.seqlen_k) and family != "nanrow":
        family = "normal"
    q, k, v, options = make(workload, seed=seed, family=family)
    want = None
    results: list[tuple[str, Tensor]] = []
    for row in FORWARD:
        run = Runner(row)
        if run.reasons(q, k, v, **options):
            continue
        views = [laid_out(x, layout) for x in (q, k, v)]
        out, lse = run(*views, **options)
        want = want or expect(q, k, v, **options)
        check(out, lse, want, label=f"{row.name} {drawn}", options=options)
        results.append((row.name, out))
    assert results, f"no row runs {drawn}"
    for name, out in results[1:]:
        own = sum(relative_l2(_finite(x), _finite(want.out)) for x in (out, results[0][1]))
        near(
            out,
            results[0][1],
            2 * own + torch.finfo(out.dtype).eps,
            f"M31 {name} and {results[0][0]}: {drawn}",
        )


def _finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, 0)


@given(problems())
def test_fuzz_gradients(drawn: tuple[Workload, str, str, int]):
    """The same draws, smaller: gradients by the relative rule."""
    workload, _, layout, seed = drawn
    if workload.batch * workload.heads * workload.seqlen_q * workload.seqlen_k > 2**16:
        return
    q, k, v, options = make(workload, seed=seed)
    dout = torch.randn((*q.shape[:3], v.shape[-1]), generator=torch.Generator().manual_seed(seed)).to(q.dtype)
    got = gradients(q, k, v, laid_out(dout, layout), **options)
    hold(got, q, k, v, dout, None, options, str(drawn))


WRONG: dict[str, tuple[Any, ...]] = {
    "causal": ("left", 1.5, None, [True]),
    "window": (3, (1,), (1.5, 2), ("a", 0), (-1, 0)),
    "mask": (torch.zeros(3), "causal", 5, torch.zeros(2, 2, 2, 2, 2, dtype=torch.bool), torch.zeros(7,
    dtype=torch.bool)),
    "bias": (torch.zeros(3, dtype=torch.int32), torch.zeros(7), 1.0, "x"),
    "alibi_slopes": (torch.zeros(9), [0.5, 0.5], torch.zeros(2, dtype=torch.int64)),
    "softcap": (-1.0, float("nan"), float("inf"), "x"),
    "sinks": (torch.zeros(9), 0.0, torch.zeros(1, 2)),
    "scale": (float("nan"), float("inf"), "x", torch.zeros(3)),
    "kv_lens": ([3, 3], torch.tensor((3, 3)), torch.tensor((3,), dtype=torch.int32), torch.tensor((-1, 3),
    dtype=torch.int32), torch.tensor((3, 99), dtype=torch.int32)),
    "kv_starts": (2, torch.tensor((0.0, 1.0)), torch.tensor((0, 99), dtype=torch.int32)),
    "q_offset": (1.5, "x", torch.tensor((1, 2)), True),
    "dropout_p": (-0.1, 1.5, float("nan"), "x"),
    "layout": ("sbhd", 3, None),
    "backend": ("cuda-magic", 3),
    "config": (3, {"block_n": 64}, "block_n=64"),
    "out": (torch.zeros(3), torch.zeros(2, 2, 5, 8, dtype=torch.float64), 4),
}  # fmt: skip


@given(
    st.sampled_from([(name, i) for name, values in WRONG.items() for i in range(len(values))]), st.booleans()
)
def test_fuzz_wrong_arguments(case: tuple[str, int], also_causal: bool):
    """Only the two documented errors (and TypeError for what is no argument at all) come out."""
    name, index = case
    q, k, v = (torch.randn(2, 2, n, 8) for n in (5, 6, 6))
    options: dict[str, Any] = {"causal": True} if also_causal and name != "causal" else {}
    options[name] = WRONG[name][index]
    try:
        polyflash.attention(q, k, v, **options)
    except (polyflash.SpecError, polyflash.UnsupportedError, TypeError):
        return
    raise AssertionError(f"{name}={WRONG[name][index]!r} was accepted")


OPERANDS = st.sampled_from(
    (None, 3, "q", [[1.0]], torch.zeros(3), torch.zeros(2, 2, 5, 8, dtype=torch.int32), torch.zeros(2, 2, 5,
    8).bfloat16(),
     torch.zeros(2, 3, 5, 8), torch.zeros(3, 2, 5, 8), torch.zeros(2, 2, 5, 9), torch.zeros(2, 2, 0, 8),
     torch.zeros(2, 2, 5, 8))
)  # fmt: skip


@given(OPERANDS, OPERANDS, OPERANDS)
def test_fuzz_wrong_operands(q: Any, k: Any, v: Any):
    try:
        polyflash.attention(q, k, v)
    except (polyflash.SpecError, polyflash.UnsupportedError, TypeError):
        return
    assert all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, k, v))
    assert q.dtype is k.dtype is v.dtype and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0]
    assert q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0
