"""The harness itself must fail when it should (B-msk-16): NaN mismatch, one wrong row, one wrong lse,
guards."""

from __future__ import annotations

import math

import pytest
import torch

from polyflash.reference import attention_reference
from tests.memory import check_guarded, guard, poisoned
from tests.tolerance import (
    check,
    check_backstop,
    check_lse,
    compare,
    eager,
    expect,
    masked_scores,
    near,
    same_bits,
    visible,
)


@pytest.fixture(params=(torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def case(request: pytest.FixtureRequest):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 64).to(request.param) for n in (40, 70, 70))
    want = expect(q, k, v, causal=True)
    wide = torch.float64 if request.param is torch.float64 else torch.float32
    return want, want.out.to(request.param), want.lse.to(wide)


def fails(out, lse, want) -> None:
    with pytest.raises(AssertionError):
        check(out, lse, want)


def test_right_answer_passes(case):
    want, out, lse = case
    check(out, lse, want)
    check_backstop(out, want)


def test_B_msk_16_nan_fails(case):
    """github.com/tracel-ai/cubecl/issues/1070: NaN against a number is a difference, in both directions."""
    want, out, lse = case
    for value in (math.nan, math.inf, -math.inf):
        wrong = out.clone()
        wrong[0, 1, 3, 5] = value
        fails(wrong, lse, want)
    fails(torch.full_like(out, math.nan), lse, want)
    with pytest.raises(AssertionError):
        near(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), 1.0)
    with pytest.raises(AssertionError):
        check_backstop(torch.full_like(out, math.nan), want)


def test_one_wrong_row_fails(case):
    want, out, lse = case
    wrong = out.clone()
    wrong[0, 1, 39] *= 1.5
    fails(wrong, lse, want)
    zero = out.clone()
    zero[0, 0, 20] = 0
    fails(zero, lse, want)


def test_one_wrong_lse_fails(case):
    want, out, lse = case
    for change in (1e-3, math.nan, math.inf, -math.inf):
        wrong = lse.clone()
        wrong[0, 1, 7] += change
        fails(out, wrong, want)


def test_small_row_fails(case):
    """A whole wrong row of small values, invisible to the maximum."""
    want, _, _ = case
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 40, 64).to(want.dtype) for _ in range(3))
    v[0, 0, 0] *= 1e-2
    small = expect(q, k, v, causal=True)
    wrong = small.out.to(want.dtype).clone()
    wrong[0, 0, 0] = -wrong[0, 0, 0]
    fails(wrong, None, small)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_one_value_may_be_off_by_one_unit(dtype):
    """Whatever adding and taking off 0.3 makes of it, and however exact T happens to be; not by two units."""
    unlucky = 0
    for bits in range(40):
        right = torch.tensor([[1.5 + bits * torch.finfo(dtype).eps]], dtype=dtype)
        unlucky += bool(((right + 0.3) - 0.3 == right).all())
        want = right.double()
        step = torch.finfo(dtype).eps
        compare((want + step).to(dtype), want, [want], dtype, ratio=2, label="one unit")
        with pytest.raises(AssertionError):
            compare((want + 3 * step).to(dtype), want, [want], dtype, ratio=2, label="three units")
    assert unlucky


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="how another BLAS sums is its own affair")
def test_a_chain_is_one_for_few_keys_too():
    """The scores of T's "chain" do not depend on how many keys and rows there are beside them."""
    torch.manual_seed(0)
    q, k = 8 * torch.randn(2, 1, 90, 64), 8 * torch.randn(2, 1, 90, 64)
    whole = masked_scores(q, k, "chain", {"q_offset": 0})
    for rows, keys in ((1, 1), (16, 3), (3, 70)):
        few = masked_scores(q[:, :, :rows], k[:, :, :keys], "chain", {"q_offset": 0})
        same_bits(few, whole[:, :, :rows, :keys])


def test_dtype_shape_and_layout_fail(case):
    want, out, lse = case
    fails(out.to(torch.float64 if out.dtype is not torch.float64 else torch.float32), lse, want)
    fails(out[..., :-1], lse, want)
    fails(out, lse.half(), want)
    with pytest.raises(AssertionError):
        check_lse(lse.transpose(1, 2).contiguous().transpose(1, 2), want)


def test_empty_row_must_be_minus_infinity():
    q, k, v = (torch.randn(1, 1, n, 16) for n in (5, 3, 3))
    want = expect(q, k, v, causal=True)
    out, lse = want.out.float(), want.lse.float()
    check(out, lse, want)
    fails(out, lse.masked_fill(lse == -math.inf, math.inf), want)
    fails(out, lse.masked_fill(lse == -math.inf, -1e30), want)
    fails(torch.where(out == 0, math.nan, out), lse, want)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (5, 2)}, {"causal": "top_left"}], ids=str
)
def test_eager_and_oracle_are_independent_and_agree(options):
    """T in float64 is the oracle within its rounding: two derivations of the same mask and formula."""
    q, k, v = (torch.randn(2, h, n, 16, dtype=torch.float64) for h, n in ((6, 30), (2, 50), (2, 50)))
    oracle = attention_reference(q, k, v, **options)
    for order in ("", "chain", "turned"):
        out, lse = eager(q, k, v, order=order, **options)
        near(out, oracle.out, 1e-14)
        near(lse, oracle.lse, 1e-14)


def test_visible_by_hand():
    q, k = torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 5, 4)

    def table(**options):
        return ["".join("01"[int(x)] for x in row) for row in visible(q, k, **options)[0, 0]]

    assert table(causal=True) == ["11100", "11110", "11111"]
    assert table(causal="top_left") == ["10000", "11000", "11100"]
    assert table(window=(1, 0)) == ["01100", "00110", "00011"]
    assert table(window=(0, 1), q_offset=0) == ["11000", "01100", "00110"]
    lens = torch.tensor((4, 5), dtype=torch.int32)
    assert table(causal=True, kv_lens=lens) == ["11000", "11100", "11110"]
    assert table(kv_starts=lens - 2) == ["00111"] * 3


def test_same_bits_sees_signs_and_nans():
    nan = torch.tensor([math.nan])
    same_bits(nan, nan.clone())
    with pytest.raises(AssertionError):
        same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_guards_see_reads_and_writes():
    box = guard(torch.randn(2, 3, 4, 5))
    box.fill_guards(7.0)
    box.assert_intact(7.0, "untouched")
    box.buffer[0] = 1
    with pytest.raises(AssertionError):
        box.assert_intact(7.0, "touched")
    assert int(box.inside.sum()) == 2 * 3 * 4 * 5

    def good(q, k, v, out):
        return out.copy_(q), q[..., 0].clone()

    q = torch.randn(1, 2, 3, 4)
    check_guarded(good, q, q, q, {})

    def overrun(q, k, v, out):
        torch.as_strided(out, (30,), (1,), out.storage_offset())[-1] = 0
        return good(q, k, v, out)

    with pytest.raises(AssertionError):
        check_guarded(overrun, q, q, q, {})


def test_poison_fills_empty():
    with poisoned():
        assert torch.empty(5).isnan().all()
        assert int(torch.empty(5, dtype=torch.int32)[0]) == 2**31 - 1
