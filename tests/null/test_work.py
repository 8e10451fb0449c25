"""work.py: only visible pairs are counted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from polyflash.mask import Mask, visible_pairs
from polyflash.spec import AttentionSpec, Feature, Phase
from polyflash.work import flops_per_pair, work_of

SPEC = AttentionSpec(Phase.FORWARD, "float16", "cpu", 2, 6, 3, 7, 9, 5, 4, frozenset())


def test_dense_forward() -> None:
    work = work_of(SPEC)
    assert work.flops == 2 * (5 + 4) * 2 * 6 * 7 * 9
    assert work.bytes == 2 * (2 * 6 * 7 * (5 + 4) + 2 * 3 * 9 * (5 + 4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (2, 0), (0, 3), (None, 1)])
@pytest.mark.parametrize("offset", [None, 0, -4, 20])
@pytest.mark.parametrize("lengths", [(7, 9), (9, 4), (1, 6)])
def test_counts_visible_pairs(
    causal: bool, window: tuple[int | None, int | None], offset: int | None, lengths: tuple[int, int]
) -> None:
    """Against a loop over Mask.visible; an offset is a shift of the rows."""
    sq, sk = lengths
    spec = replace(SPEC, seqlen_q=sq, seqlen_k=sk, causal=causal, window=window, offset=offset)
    mask = Mask.window(*window) & (Mask.causal() if causal else Mask())
    shift = 0 if offset is None else offset - (sk - sq)
    pairs = sum(
        mask.visible(i + shift, j, seqlen_q=sq, seqlen_k=sk)
        for i, j in itertools.product(range(sq), range(sk))
    )
    assert work_of(spec).flops == 2 * (5 + 4) * 2 * 6 * pairs


def test_backward_is_two_and_a_half_times_forward() -> None:
    square = replace(SPEC, head_dim_v=SPEC.head_dim)
    forward, backward = work_of(square), work_of(replace(square, phase=Phase.BACKWARD))
    assert backward.flops == 2.5 * forward.flops


@pytest.mark.parametrize(
    "changed", [{}, {"causal": True}, {"window": (3, 0)}, {"causal": True, "offset": -3}]
)
def test_the_products_of_the_backward_pass(changed: dict[str, Any]) -> None:
    """Three over head_dim (QK, dS·K, dSᵀQ), two over head_dim_v (dO·V, PᵀdO)."""
    forward = work_of(replace(SPEC, **changed))
    pairs = forward.flops / (2 * (5 + 4) * 2 * 6)
    backward = work_of(replace(SPEC, phase=Phase.BACKWARD, **changed))
    assert backward.flops == pytest.approx(2 * (3 * 5 + 2 * 4) * 2 * 6 * pairs, rel=1e-15)


@pytest.mark.parametrize("dtype, size, lse", [("float16", 2, 4), ("float32", 4, 4), ("float64", 8, 8)])
def test_bytes_of_the_backward_pass(dtype: str, size: int, lse: int) -> None:
    read = 2 * 6 * 7 * (5 + 4 + 4) + 2 * 3 * 9 * (5 + 4)  # q, out, dout; k, v
    written = 2 * 6 * 7 * 5 + 2 * 3 * 9 * (5 + 4)  # dq; dk, dv
    work = work_of(replace(SPEC, phase=Phase.BACKWARD, dtype=dtype))
    assert work.bytes == size * (read + written) + lse * 2 * 6 * 7


def test_flops_of_a_pass_per_pair() -> None:
    passes = {phase: flops_per_pair(phase, 64, 32) for phase in Phase}
    assert passes[Phase.FORWARD] == passes[Phase.DECODE] == 2 * (64 + 32)
    assert passes[Phase.BACKWARD] == 2 * (3 * 64 + 2 * 32)
    assert passes[Phase.STATISTICS] == 2 * 64


def test_square_causal_is_about_half() -> None:
    square = replace(SPEC, seqlen_q=4096, seqlen_k=4096)
    assert abs(work_of(replace(square, causal=True)).flops / work_of(square).flops - 0.5) < 2e-4


@pytest.mark.parametrize("zero", ["batch", "num_q_heads", "seqlen_q", "seqlen_k"])
def test_zero_sizes_are_no_work(zero: str) -> None:
    assert work_of(replace(SPEC, **{zero: 0})).flops == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (2, 0), (0, 3), (None, 1), (3, None)])
@pytest.mark.parametrize("members", [((3, 4), (0, 5), (7, 2)), ((1, 9),) * 4, ((8, 0), (0, 8)), ((5, 5),)])
def test_packed_members_are_counted_from_above(causal: bool, window: Any, members: Any) -> None:
    """No tensor is read: never less than the members' pairs, and exact for equal members without a rule."""
    rows, keys = (sum(lengths) for lengths in zip(*members, strict=True))
    pairs = sum(visible_pairs(sq, sk, offset=sk - sq, causal=causal, window=window) for sq, sk in members)
    features = frozenset({Feature.VARLEN})
    spec = replace(
        SPEC, batch=1, seqlen_q=rows, seqlen_k=keys, causal=causal, window=window, features=features,
        members=len(members),
    )  # fmt: skip
    longest = replace(spec, max_seqlen_q=max(m[0] for m in members), max_seqlen_k=max(m[1] for m in members))
    unit = 2 * (5 + 4) * 6
    assert unit * pairs <= work_of(longest).flops <= work_of(spec).flops <= unit * rows * keys
    if not causal and window == (None, None) and len(set(members)) == 1:
        assert work_of(longest).flops == unit * pairs


@pytest.mark.parametrize("right", (None, 0, 9))
def test_causal_members_see_no_further_than_their_window(right: int | None) -> None:
    spec = replace(
        SPEC, batch=1, seqlen_q=40, seqlen_k=300, causal=True, window=(3, right), members=2,
        features=frozenset({Feature.VARLEN}),
    )  # fmt: skip
    assert work_of(spec).flops == 2 * (5 + 4) * 6 * 40 * 4
