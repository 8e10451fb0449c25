"""Real defects of other implementations: masks, empty rows, -inf and NaN. A test is named by the id of its
report."""

from __future__ import annotations

import math

import pytest
import torch

import polyflash
from tests.conformance.rows import DTYPES, FORWARD, Runner, ints, qkv
from tests.memory import check_hidden
from tests.tolerance import near, relative_l2, same_bits


def test_B_msk_01_finite_minimum_is_not_minus_infinity(run: Runner):
    """github.com/pytorch/pytorch/issues/110213: a bias row of finfo.min shifts, a row of -inf hides."""
    for dtype in DTYPES:
        q, k, v = qkv(1, 2, 4, 40, 16, dtype=dtype)
        bias = torch.zeros(1, 1, 4, 40, dtype=dtype)
        bias[..., 1, :] = torch.finfo(dtype).min
        bias[..., 2, :] = -math.inf
        out, lse = run(q, k, v, bias=bias)
        assert torch.isfinite(out).all() and torch.isfinite(lse[:, :, (0, 1, 3)]).all()
        assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == -math.inf).all()
        if dtype is not torch.float16:  # scores vanish beside 3e38: uniform
            near(out[:, :, 1], v.double().mean(2), 8e-3)


def test_B_msk_02_padding_hides_one_entry(run: Runner):
    """github.com/pytorch/pytorch/issues/41508."""
    q, k, v = qkv(3, 2, 30, 40, 16)
    mask = torch.tensor((True, False, True)).view(3, 1, 1, 1).expand(3, 1, 1, 40)
    out, lse = run.checked(q, k, v, mask=mask)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    everything = torch.ones(3, 1, 1, 1, dtype=torch.bool).expand(3, 1, 1, 40)
    same_bits(out[0], run(q, k, v, mask=everything).out[0])


def test_B_msk_03_nan_behind_the_mask(run: Runner):
    """github.com/pytorch/pytorch/issues/101967."""
    q, k, v = qkv(2, (4, 2), 30, 140, 32)
    mask = torch.rand(2, 1, 1, 140) < 0.5
    check_hidden(run, q, k, v, {"mask": mask})


def test_B_msk_04_fully_masked_tiles(run: Runner):
    """github.com/pytorch/pytorch/issues/127055: N = 640, whole (row block × key block) pairs hidden."""
    q, k, v = qkv(1, 1, 640, 640, 16)
    at = torch.arange(640)
    mask = (at[:, None] - at).abs() < 40
    a = run.checked(q, k, v, mask=mask)
    b = run.checked(q, k, v, window=(39, 39))
    near(a.out, b.out, 2e-6)
    late = torch.zeros(640, 640, dtype=torch.bool)
    late[:, 600:] = True  # the first tiles of every row are hidden
    run.checked(q, k, v, mask=late)


def test_B_msk_06_one_by_one(run: Runner):
    """github.com/Dao-AILab/flash-attention/issues/334."""
    for dtype in DTYPES:
        q, k, v = (3 * x for x in qkv(1, 1, 1, 1, 16, dtype=dtype))
        for causal in (False, True):
            same_bits(run.checked(q, k, v, causal=causal).out, v)


def test_B_msk_07_large_causal(run: Runner):
    """github.com/Dao-AILab/flash-attention/issues/1052."""
    q, k, v = (3 * x for x in qkv(1, 1, 1024, 1024, 128, dtype=torch.float16))
    run.checked(q, k, v, causal=True)


def test_B_msk_08_lse_of_an_empty_row(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/978: -inf, never +inf, so that a merge ignores it."""
    q, k, v = qkv(1, 2, 40, 20, 16)
    empty = run(q, k, v, causal=True)
    assert (empty.lse[:, :, :20] == -math.inf).all() and not (empty.lse == math.inf).any()
    other = run(q, k, v)
    merged = polyflash.merge(
        empty.out[:, :, :20], empty.lse[:, :, :20], other.out[:, :, :20], other.lse[:, :, :20]
    )
    same_bits(merged.out, other.out[:, :, :20])
    same_bits(merged.lse, other.lse[:, :, :20])


def test_B_msk_09_merge_of_empty_states():
    """github.com/flashinfer-ai/flashinfer/issues/4051; whatever bits the empty state's output holds."""
    out, lse = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3)
    for filler in (0.0, math.nan, math.inf):
        nothing = torch.full_like(out, filler), torch.full_like(lse, -math.inf)
        for pair in ((*nothing, out, lse), (out, lse, *nothing)):
            merged = polyflash.merge(*pair)
            same_bits(merged.out, out)
            same_bits(merged.lse, lse)
        both = polyflash.merge(*nothing, *nothing)
        assert (both.out == 0).all() and (both.lse == -math.inf).all()


def test_B_msk_10_live_length_below_the_rows(run: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/1533: causal, per request; rows written, not left as
    allocated."""
    q, k, v = qkv(3, 2, 70, 130, 16)
    out = torch.full(q.shape, math.nan)
    got = run(q, k, v, causal=True, kv_lens=ints(130, 20, 1), out=out)
    assert (got.out[1, :, :50] == 0).all() and (got.out[2, :, :69] == 0).all() and not got.out.isnan().any()
    run.checked(q, k, v, causal=True, kv_lens=ints(130, 20, 1))


def test_B_msk_11_length_inside_a_tile(step: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/3717: q = 0, so the mean of exactly the live values."""
    lens = (1, 15, 16, 17, 100, 127, 129, 130)
    for dtype in DTYPES:
        q, k, v = qkv(8, (4, 2), 1, 130, 32, dtype=dtype)
        out = step(torch.zeros_like(q), k, v, kv_lens=ints(*lens)).out
        for b, n in enumerate(lens):
            near(
                out[b],
                v[b, :, :n].double().mean(1, keepdim=True).repeat_interleave(2, 0),
                4 * torch.finfo(dtype).eps,
            )


def test_B_msk_12_causal_and_mask_hide_a_row_together(run: Runner):
    """github.com/tracel-ai/burn/pull/4697."""
    q, k, v = qkv(1, 2, 40, 40, 16)
    mask = torch.ones(40, 40, dtype=torch.bool)
    mask[7, :8] = False
    mask[20, :21] = False
    out, lse = run.checked(q, k, v, mask=mask, causal=True)
    assert (out[:, :, (7, 20)] == 0).all() and (lse[:, :, (7, 20)] == -math.inf).all()


def test_B_msk_13_B_msk_14_mask_and_causal_combine(run: Runner):
    """github.com/pytorch/pytorch/issues/187801, github.com/keras-team/keras/issues/23038: both apply,
    everywhere."""
    q, k, v = qkv(1, 2, 50, 50, 16)
    mask = torch.rand(50, 50) < 0.7
    both = run.checked(q, k, v, mask=mask, causal=True)
    near(both.out, run(q, k, v, mask=mask & torch.ones(50, 50).tril().bool()).out, 2e-6)
    near(both.out, run(q, k, v, mask=mask, window=(None, 0)).out, 2e-6)


def test_B_msk_15_one_live_score_in_100000(run: Runner):
    """github.com/Dao-AILab/flash-attention/issues/1930: everything hidden but key 50000, by mask and by
    bias."""
    q, k, v = qkv(1, 1, 2, 100_000, 8)
    mask = torch.arange(100_000) == 50_000
    want = v[:, :, 50_000:50_001].expand(1, 1, 2, 8).contiguous()
    same_bits(run(q, k, v, mask=mask).out, want)
    bias = torch.zeros(100_000).masked_fill(~mask, -math.inf)
    same_bits(run(q, k, v, bias=bias).out, want)


@pytest.mark.parametrize("causal", (False, True))
def test_B_msk_17_B_msk_18_length_zero(run: Runner, causal: bool):
    """github.com/flashinfer-ai/flashinfer/pull/363 and /1198: decode, chunk and prefill; returns, others
    right."""
    for rows in (1, 4, 20, 70):
        q, k, v = qkv(3, (8, 2), rows, 90, 16)
        out, lse = run.checked(q, k, v, causal=causal, kv_lens=ints(90, 0, 33))
        assert (out[1] == 0).all() and (lse[1] == -math.inf).all()


def test_B_msk_19_scores_beyond_fp16(run: Runner):
    """github.com/thu-ml/SageAttention/pull/372: raw scores above 65504 stay finite."""
    q, k, v = qkv(2, (4, 2), 40, 130, 128, dtype=torch.float16)
    out, lse = run(q * 3000, k * 3000, v)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    assert float(lse.abs().max()) > 65504
    assert float(out.abs().max()) <= float(v.abs().max())


def test_B_msk_20_later_maximum_is_smaller(run: Runner):
    """github.com/tile-ai/tilelang/pull/1148: scores falling by block."""
    for dtype in DTYPES:
        q, k, v = qkv(1, 2, 20, 600, 32, dtype=dtype)
        q[..., 0], k[..., 0] = 4, torch.linspace(40, -40, 600).to(dtype)
        run.checked(q, k, v)
        run.checked(q, k.flip(2), v.flip(2))


def test_B_msk_21_bias_hides_a_whole_split(step: Runner):
    """xformers CHANGELOG 0.0.28: decode over many keys, additive -inf over a long stretch."""
    q, k, v = qkv(2, (8, 2), 1, 2000, 16)
    for start, stop in ((0, 1024), (900, 2000), (0, 2000), (512, 1024)):
        bias = torch.zeros(1, 1, 1, 2000)
        bias[..., start:stop] = -math.inf
        out, _ = step.checked(q, k, v, bias=bias)
        if stop - start == 2000:
            assert (out == 0).all()


def test_B_msk_21_mask_hides_a_whole_split(run: Runner):
    """The same by a bool mask and by first keys, for rows without bias."""
    q, k, v = qkv(2, (8, 2), 1, 2000, 16)
    keys = torch.arange(2000)
    for start, stop in ((0, 1024), (900, 2000), (0, 2000), (512, 1024)):
        run.checked(q, k, v, mask=(keys < start) | (keys >= stop))
    run.checked(q, k, v, kv_starts=ints(1024, 1999))


def test_B_msk_22_offset_keeps_earlier_keys(step: Runner):
    """github.com/openai/gpt-oss/pull/196: q_offset > 0 attends to the keys before it."""
    q, k, v = qkv(1, 2, 8, 200, 16)
    for offset in (5, 64, 150):
        got = step.checked(q, k, v, causal=True, q_offset=offset)
        same = step(q, k[:, :, : offset + 8], v[:, :, : offset + 8], causal=True)
        near(got.out, same.out, 1e-6)


def test_B_msk_23_no_logarithm_of_zero(run: Runner):
    """github.com/NVIDIA/Model-Optimizer/pull/1034: -inf exactly, bit for bit."""
    q, k, v = qkv(1, 1, 40, 20, 16)
    lse = run(q, k, v, causal=True).lse[:, :, :20]
    same_bits(lse, torch.full_like(lse, -math.inf))


def test_B_msk_24_rows_agree_on_masked_rows():
    """github.com/ml-explore/mlx/issues/2608: 0 in every row of the table."""
    q, k, v = qkv(1, 2, 40, 20, 16)
    for row in FORWARD:
        one = Runner(row)
        if not one.reasons(q, k, v, causal=True):
            assert (one(q, k, v, causal=True).out[:, :, :20] == 0).all(), row.name


def test_B_emp_01_no_keys(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/2470."""
    q, k, v = qkv(2, (4, 2), 5, 0, 16)
    for options in (
        {},
        {"causal": True},
        {"window": (3, 3)},
        {"kv_lens": ints(0, 0)},
        {"causal": "top_left"},
    ):
        out, lse = run(q, k, v, **options)
        assert (out == 0).all() and (lse == -math.inf).all() and out.shape == q.shape


@pytest.mark.parametrize(
    "sizes", [(7, 9, 0, 7, 4), (0, 0, 2, 3, 4), (2, 0, 2, 3, 4), (1, 1, 0, 0, 4)], ids=str
)
def test_B_emp_04_zero_anywhere(run: Runner, sizes: tuple[int, ...]):
    """github.com/pytorch/pytorch/issues/141218."""
    batch, heads, rows, keys, dim = sizes
    out, lse = run(*qkv(batch, heads, rows, keys, dim))
    assert out.shape == (batch, heads, rows, dim) and lse.shape == (batch, heads, rows)


def test_B_emp_08_empty_request_first(run: Runner):
    """github.com/sgl-project/sglang/pull/22688: the requests after an empty one are not shifted."""
    q, k, v = qkv(4, (4, 2), 17, 80, 16)
    for lens in ((0, 80, 33, 60), (80, 0, 0, 60), (0, 0, 0, 1)):
        got = run.checked(q, k, v, kv_lens=ints(*lens), causal=True)
        for b, n in enumerate(lens):
            if n:
                one = run(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], causal=True)
                near(got.out[b : b + 1], one.out, 1e-6)


def test_B_emp_09_no_batch_no_rows(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/2515."""
    for batch, rows in ((0, 5), (2, 0), (0, 0)):
        for causal in (False, True):
            q, k, v = qkv(batch, (8, 2), rows, 40, 16)
            out, lse = run(q, k, v, causal=causal)
            assert out.shape == (batch, 8, rows, 16) and lse.shape == (batch, 8, rows)


def test_B_cau_01_few_rows_are_bottom_right(run: Runner):
    """github.com/thu-ml/SageAttention/pull/372: M = 1…16 < N."""
    for dtype in DTYPES:
        for rows in range(1, 17):
            q, k, v = qkv(1, 2, rows, 90, 16, dtype=dtype)
            run.checked(q, k, v, causal=True, label=f"{rows} rows")


def test_B_cau_03_B_cau_04_more_rows_than_keys(run: Runner):
    """github.com/Dao-AILab/flash-attention/issues/282, github.com/flagos-ai/FlagAttention/pull/12."""
    for rows, keys in ((2, 1), (64, 1), (65, 64), (300, 5), (129, 128), (1100, 3)):
        q, k, v = qkv(1, 2, rows, keys, 16)
        out, lse = run.checked(q, k, v, causal=True)
        assert (out[:, :, : rows - keys] == 0).all() and (lse[:, :, : rows - keys] == -math.inf).all()
        assert torch.isfinite(lse[:, :, rows - keys :]).all()


def test_B_cau_06_chunk_over_a_longer_cache(run: Runner):
    """github.com/GeeeekExplorer/nano-vllm/pull/213: keys of earlier chunks are attended."""
    q, k, v = qkv(1, 2, 96, 96, 16)
    whole = run(q, k, v, causal=True).out
    for start in (32, 64):
        part = run(q[:, :, start : start + 32], k[:, :, : start + 32], v[:, :, : start + 32], causal=True).out
        near(part, whole[:, :, start : start + 32], 1e-6)


def test_B_cau_08_windows_that_are_causal(run: Runner):
    """github.com/Dao-AILab/flash-attention/issues/1133."""
    for n in (1, 16, 65, 130):
        q, k, v = qkv(1, 2, n, n, 16)
        want = run(q, k, v, causal=True).out
        for left in (None, n, n - 1):
            near(run(q, k, v, window=(left, 0)).out, want, 1e-6, f"n {n} left {left}")


def test_B_cau_09_tiles_left_of_the_window(run: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/3682."""
    for n in (257, 513):
        q, k, v = qkv(1, 2, n, n, 16)
        for left in (1, 16, 100, 127, 128):
            run.checked(q, k, v, causal=True, window=(left, None), label=f"{n} {left}")


def test_B_cau_12_alignment_by_live_length(step: Runner):
    """github.com/microsoft/onnxruntime/pull/28958: not by the physical length of the cache."""
    q, k, v = qkv(2, (4, 2), 4, 256, 16)
    got = step.checked(q, k, v, causal=True, kv_lens=ints(77, 256))
    one = step(q[:1], k[:1, :, :77], v[:1, :, :77], causal=True)
    near(got.out[:1], one.out, 1e-6)


def test_B_q_02_large_values_do_not_overflow(step: Runner):
    """github.com/thu-ml/SageAttention/issues/93: |V| > 100, N >= 4096, fp16 storage."""
    q, k, v = qkv(1, 1, 4, 4096, 16, dtype=torch.float16)
    step.checked(0 * q, k, v.abs() * 100 + 1000)


def test_B_q_12_B_spl_03_scale_reaches_scores_and_lse(run: Runner):
    """github.com/hao-ai-lab/FastVideo/pull/1457, github.com/HKUSTDial/flash-sparse-attention/pull/106."""
    for dtype in DTYPES:
        q, k, v = qkv(1, (4, 2), 20, 300, 64, dtype=dtype)
        for scale in (0.01, 0.05, 0.5, 1.0, 2.0, 3.0, -0.125, 1e-30):
            run.checked(q, k, v, scale=scale, causal=True, label=f"scale {scale}")


def test_B_q_20_B_q_21_zero_and_negative_scale(run: Runner):
    """github.com/ROCm/aotriton/issues/47, github.com/Dao-AILab/flash-attention/issues/1461: mask after
    scaling."""
    q, k, v = qkv(1, 2, 40, 30, 16)
    for scale in (0.0, -1.0, -0.0):
        out, _ = run.checked(q, k, v, scale=scale, causal=True)
        assert (out[:, :, :10] == 0).all() and torch.isfinite(out).all()
        mask = torch.rand(40, 30) < 0.3
        run.checked(q, k, v, scale=scale, mask=mask)


def test_B_spl_07_merge_of_distant_states():
    """github.com/jzhang38/EasyContext/issues/14: exp(l2 - l1) overflows from 89 on."""
    out = torch.ones(1, 1, 1, 4)
    for distance in (90.0, -90.0, 1e4, -1e4, 3e38):
        a, b = torch.zeros(1, 1, 1), torch.full((1, 1, 1), distance)
        merged = polyflash.merge(out, a, 2 * out, b)
        assert torch.isfinite(merged.out).all() and torch.isfinite(merged.lse).all()
        assert abs(float(merged.lse) - max(0.0, distance)) <= 1e-7 * abs(distance)
        assert float(merged.out[0, 0, 0, 0]) == (2.0 if distance > 0 else 1.0)


def test_B_spl_08_merge_accumulates_in_fp32(step: Runner):
    """github.com/zhuzilin/ring-flash-attention/issues/42: a merge of bf16 parts gives fp32, and does not
    drift."""
    q, k, v = qkv(1, 2, 8, 512, 32, dtype=torch.bfloat16)
    full = step(q.float(), k.float(), v.float())
    parts = [step(q, k[:, :, i : i + 16], v[:, :, i : i + 16]) for i in range(0, 512, 16)]
    out, lse = parts[0].out, parts[0].lse
    for part in parts[1:]:
        out, lse = polyflash.merge(out, lse, *part)
        assert out.dtype is torch.float32 and lse.dtype is torch.float32
    assert relative_l2(out, full.out) <= 5e-3
