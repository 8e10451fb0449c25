"""Properties that need no reference, M1 to M35; "bit" ones bit for bit, the others to rounding."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import polyflash
from tests.conformance.rows import DTYPES, FORWARD, ROUNDING, Runner, ints, qkv
from tests.tolerance import expect, near, relative_l2, same_bits


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def problem(dtype: torch.dtype, rows: int = 70, keys: int = 130, batch: int = 3):
    return qkv(batch, (6, 2), rows, keys, 64, dtype=dtype, seed=9)


def test_M1_batch_permutation(run: Runner, dtype):
    q, k, v = problem(dtype)
    order = torch.tensor((2, 0, 1))
    for options in ({}, {"causal": True}, {"window": (30, 5)}):
        a, b = run(q, k, v, **options), run(q[order], k[order], v[order], **options)
        same_bits(a.out[order], b.out)
        same_bits(a.lse[order], b.lse)


def test_M2_kv_group_permutation(run: Runner, dtype):
    q, k, v = problem(dtype)
    a = run(q, k, v, causal=True)
    b = run(torch.cat((q[:, 3:], q[:, :3]), 1), k.flip(1), v.flip(1), causal=True)
    same_bits(torch.cat((a.out[:, 3:], a.out[:, :3]), 1), b.out)


def test_M3_key_permutation(run: Runner, dtype):
    q, k, v = problem(dtype)
    order = torch.randperm(130)
    a, b = run(q, k, v), run(q, k[:, :, order], v[:, :, order])
    near(a.out, b.out, ROUNDING[dtype])
    torch.testing.assert_close(a.lse, b.lse, rtol=1e-5, atol=1e-5)


def test_M4_row_permutation(run: Runner, dtype):
    q, k, v = problem(dtype)
    order = torch.randperm(70)
    near(run(q, k, v).out[:, :, order], run(q[:, :, order], k, v).out, ROUNDING[dtype])


def test_M5_score_shift(run: Runner):
    """K + u for every key shifts each row by q·u: O keeps, lse moves."""
    q, k, v = problem(torch.float32)
    q[..., 0] = 1
    for shift in (-100.0, -3.0, 8.0, 1000.0):
        u = torch.zeros(64)
        u[0] = shift * 8  # scale is 1/8
        a, b = run(q, k, v), run(q, k + u, v)
        near(a.out, b.out, 1e-6 + 1e-6 * abs(shift))
        torch.testing.assert_close(
            b.lse - a.lse, torch.full_like(a.lse, shift), rtol=0, atol=1e-6 * max(10, abs(shift))
        )


def test_M5_score_shift_by_bias(run: Runner):
    q, k, v = problem(torch.float32)
    a = run(q, k, v)
    for shift in (-1000.0, 5.0, 1000.0):
        b = run(q, k, v, bias=torch.full((1, 1, 1, 1), shift))
        near(a.out, b.out, 1e-6 + 1e-7 * abs(shift))
        torch.testing.assert_close(b.lse - a.lse, torch.full_like(a.lse, shift), rtol=0, atol=2e-4)


def test_M6_powers_of_two(run: Runner, dtype):
    q, k, v = problem(dtype)
    k = torch.where(k.abs() < 1e-2, 1e-2, k)  # k / 4 must not be subnormal
    same_bits(run(q, k, v).out, run(q * 4, k / 4, v).out)
    same_bits(run(q, k, v, scale=0.125).out, run(q * 2, k, v, scale=0.0625).out)


def test_M7_negated_q_and_k(run: Runner, dtype):
    q, k, v = problem(dtype)
    a, b = run(q, k, v, causal=True), run(-q, -k, v, causal=True)
    same_bits(a.out, b.out)
    same_bits(a.lse, b.lse)


def test_M8_scaled_values(run: Runner, dtype):
    q, k, v = problem(dtype)
    a = run(q, k, v).out
    same_bits(a * -1, run(q, k, -v).out)
    if dtype is not torch.float16:
        same_bits(a * 8, run(q, k, v * 8).out)


def test_M9_affine_in_values(run: Runner):
    q, k, v = problem(torch.float32)
    w = torch.randn_like(v)
    near(run(q, k, 0.7 * v - 1.3 * w).out, 0.7 * run(q, k, v).out - 1.3 * run(q, k, w).out, 1e-6)


def test_M10_constant_values(run: Runner, dtype):
    """B-spl-04: V = 1 gives 1 within two rounding units, on every kind of row."""
    for rows, keys in ((1, 257), (70, 130), (17, 1100)):
        q, k, v = problem(dtype, rows, keys)
        unit = max(torch.finfo(dtype).eps, 5e-7)  # eager float32 reaches 7e-7
        for options in ({}, {"causal": True}, {"window": (9, 9)}):
            out = run(q, k, torch.ones_like(v), **options).out
            assert ((out - 1).abs().max()) <= 2 * unit, options
        w = v[:, :, :1]
        out = run(q, k, w.expand_as(v)).out
        want = w.repeat_interleave(3, 1).expand_as(out)
        assert ((out - want).abs() <= 2 * unit * want.abs() + 1e-30).all()


def test_M11_hull(run: Runner, dtype):
    q, k, v = problem(dtype)
    for options in ({}, {"causal": True}):
        out = run(q, k, v, **options).out
        top, bottom = (f(v.repeat_interleave(3, 1), dim=2).values[:, :, None] for f in (torch.max, torch.min))
        unit = torch.finfo(dtype).eps * v.abs().max()
        assert (out <= top + unit).all() and (out >= bottom - unit).all()


def test_M12_equal_keys(run: Runner, dtype):
    q, k, v = problem(dtype)
    k = k[:, :, :1].expand_as(k)
    out, lse = run(q, k, v)
    near(out, v.double().mean(2, keepdim=True).repeat_interleave(3, 1).expand_as(out), 2 * ROUNDING[dtype])
    s = (q.double() * k.double().repeat_interleave(3, 1)[:, :, :1]).sum(-1) / 8
    torch.testing.assert_close(lse.double(), s + math.log(130), rtol=1e-5, atol=1e-5)


def test_M13_duplicated_keys(run: Runner, dtype):
    q, k, v = problem(dtype)
    a, b = run(q, k, v), run(q, torch.cat((k, k), 2), torch.cat((v, v), 2))
    near(a.out, b.out, ROUNDING[dtype])
    torch.testing.assert_close(b.lse - a.lse, torch.full_like(a.lse, math.log(2)), rtol=0, atol=1e-5)


def test_M14_single_key(run: Runner, dtype):
    """One visible key: its value row, bit for bit, by length, mask, window and causal."""
    q, k, v = problem(dtype)
    wide = v.repeat_interleave(3, 1)
    one = run(q, k[:, :, :1], v[:, :, :1]).out
    same_bits(one, wide[:, :, :1].expand_as(one).contiguous())
    mask = torch.arange(130) == 77
    got = run(q, k, v, mask=mask).out
    same_bits(got, wide[:, :, 77:78].expand_as(got).contiguous())
    got = run(q[:, :, :64], k, v, window=(0, 0), q_offset=3).out
    same_bits(got, wide[:, :, 3:67].contiguous())
    got = run(q, k, v, kv_lens=ints(51, 130, 1), kv_starts=ints(50, 129, 0)).out
    same_bits(got[0], wide[0, :, 50:51].expand_as(got[0]).contiguous())


def test_M15_temperature(run: Runner, dtype):
    """B-q-20: scale 0 is the mean of the visible values; a large scale picks the maximum."""
    q, k, v = problem(dtype)
    out, lse = run(q, k, v, scale=0.0)
    near(out, v.double().mean(2, keepdim=True).repeat_interleave(3, 1).expand_as(out), 2 * ROUNDING[dtype])
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(130)), rtol=0, atol=1e-5)
    run.checked(q, k, v, scale=0.0, causal=True)
    sharp = run(q, k, v, scale=1000.0).out
    best = (q.double() @ k.double().repeat_interleave(3, 1).transpose(2, 3)).topk(2, -1)
    clear = best.values[..., 0] - best.values[..., 1] > 0.05
    picked = v.repeat_interleave(3, 1).gather(2, best.indices[..., :1].expand(-1, -1, -1, 64))
    assert clear.any()
    near(sharp[clear], picked[clear], 0.0 if dtype is torch.float32 else ROUNDING[dtype])


def test_M16_appended_keys(run: Runner, dtype):
    """Keys hidden behind the real ones change no bit: by length and by mask, at the same key count."""
    q, k, v = problem(dtype)
    lens = ints(100, 100, 100)
    a = run(q, k, v, kv_lens=lens)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 100:], v2[:, :, 100:] = math.nan, math.inf
    same_bits(a.out, run(q, k2, v2, kv_lens=lens).out)
    mask = torch.arange(130) < 100
    same_bits(run(q, k, v, mask=mask).out, run(q, k2, v2, mask=mask).out)
    near(a.out, run(q, k[:, :, :100], v[:, :, :100]).out, ROUNDING[dtype])


def test_M17_appended_queries(run: Runner, dtype):
    q, k, v = problem(dtype, rows=200)
    whole = run(q, k, v, causal=True, q_offset=5)
    part = run(q[:, :, :130], k, v, causal=True, q_offset=5)
    near(whole.out[:, :, :130], part.out, ROUNDING[dtype])
    noise = q.clone()
    noise[:, :, 130:] = math.nan
    again = run(noise, k, v, causal=True, q_offset=5)
    same_bits(whole.out[:, :, :130], again.out[:, :, :130])


def test_M18_causal_prefix(run: Runner, dtype):
    q, k, v = problem(dtype, 130, 200)
    whole = run(q, k, v, causal=True)
    for m in (1, 16, 64, 129):
        part = run(q[:, :, :m], k[:, :, : 70 + m], v[:, :, : 70 + m], causal=True)
        near(whole.out[:, :, :m], part.out, ROUNDING[dtype], f"prefix {m}")


def test_M19_first_causal_row(run: Runner, dtype):
    q, k, v = problem(dtype, 130, 130)
    out = run(q, k, v, causal=True).out
    same_bits(out[:, :, :1], v[:, :, :1].repeat_interleave(3, 1))


def test_M20_window_identities(run: Runner, dtype):
    """B-cau-08."""
    n = 130
    q, k, v = problem(dtype, n, n)
    full, causal = run(q, k, v), run(q, k, v, causal=True)
    near(run(q, k, v, window=(n, n)).out, full.out, ROUNDING[dtype])
    for window in ((None, 0), (n, 0), (n - 1, 0)):
        near(run(q, k, v, window=window).out, causal.out, ROUNDING[dtype], str(window))
        near(run(q, k, v, window=window, causal=True).out, causal.out, ROUNDING[dtype], str(window))
    same_bits(run(q, k, v, window=(0, 0)).out, v.repeat_interleave(3, 1))


def test_M21_causal_and_its_complement_merge(run: Runner):
    q, k, v = problem(torch.float32, 100, 130)
    low, full = run(q, k, v, causal=True), run(q, k, v)
    at = torch.arange(100)[:, None] + 30
    high = run(q, k, v, mask=torch.arange(130) > at)
    merged = polyflash.merge(low.out, low.lse, high.out, high.lse)
    near(merged.out, full.out, 2e-6)
    torch.testing.assert_close(merged.lse, full.lse, rtol=1e-5, atol=1e-5)


def test_M22_split_and_merge(run: Runner):
    """B-spl-02: any cut, empty and single-key parts, any order; commutative bit for bit."""
    q, k, v = problem(torch.float32, 20, 257)
    full = run(q, k, v)
    for cuts in ((1,), (64,), (0, 100), (1, 2, 3), (50, 50, 256), (13, 77, 140, 201)):
        edges = (0, *cuts, 257)
        parts = [run(q, k[:, :, a:b], v[:, :, a:b]) for a, b in itertools.pairwise(edges)]
        for order in (parts, parts[::-1]):
            out, lse = order[0].out.float(), order[0].lse
            for part in order[1:]:
                forward, swapped = polyflash.merge(out, lse, *part), polyflash.merge(*part, out, lse)
                same_bits(forward.out, swapped.out)
                same_bits(forward.lse, swapped.lse)
                out, lse = forward
            near(out, full.out, 2e-6, f"cuts {cuts}")
            torch.testing.assert_close(lse, full.lse, rtol=1e-5, atol=1e-5)


def test_M24_chunks_and_steps(run: Runner, dtype):
    """B-cau-06, B-q-17: chunked prefill and step-by-step decode are the full prefill."""
    n = 70
    q, k, v = problem(dtype, n, n, batch=2)
    whole = run(q, k, v, causal=True)
    for cuts in ((16, 33, 64), (1, 2), tuple(range(1, n))):
        edges = (0, *cuts, n)
        rows = [
            run(q[:, :, a:b], k[:, :, :b], v[:, :, :b], causal=True) for a, b in itertools.pairwise(edges)
        ]
        near(torch.cat([r.out for r in rows], 2), whole.out, ROUNDING[dtype], f"{len(cuts)} cuts")
        near(torch.cat([r.lse for r in rows], 2), whole.lse, 1e-6)


def test_M25_grouped_heads(run: Runner, dtype):
    q, k, v = problem(dtype)
    for options in ({}, {"causal": True}, {"kv_lens": ints(130, 3, 70)}):
        a = run(q, k, v, **options)
        b = run(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), **options)
        near(a.out, b.out, ROUNDING[dtype])


def test_M30_padded_head_dims(run: Runner, dtype):
    q, k, v = problem(dtype)
    pad = torch.nn.functional.pad
    a = run(q, k, v, scale=0.125)
    near(a.out, run(pad(q, (0, 9)), pad(k, (0, 9)), v, scale=0.125).out, ROUNDING[dtype])
    b = run(q, k, pad(v, (0, 9)), scale=0.125).out
    near(b[..., :64], a.out, ROUNDING[dtype])
    assert (b[..., 64:] == 0).all()


def test_M31_rows_agree(dtype):
    """Every row that accepts a call, pairwise: within twice the sum of their own errors, plus one rounding
    unit."""
    for options in ({}, {"causal": True}, {"window": (20, None), "kv_lens": ints(130, 60, 0)}):
        q, k, v = problem(dtype)
        want = expect(q, k, v, **options)
        results = [
            Runner(row)(q, k, v, **options) for row in FORWARD if not Runner(row).reasons(q, k, v, **options)
        ]
        for i, a in enumerate(results):
            for b in results[:i]:
                bound = (
                    2 * (relative_l2(a.out, want.out) + relative_l2(b.out, want.out)) + torch.finfo(dtype).eps
                )
                near(a.out, b.out, bound)


def test_M32_second_call(run: Runner, dtype):
    q, k, v = problem(dtype)
    for options in ({}, {"causal": True}):
        a, b = run(q, k, v, **options), run(q, k, v, **options)
        same_bits(a.out, b.out)
        same_bits(a.lse, b.lse)


def test_M33_rotation(run: Runner):
    q, k, v = problem(torch.float32)
    rotation = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64)).Q
    turned = [(x.double() @ rotation).float() for x in (q, k)]
    near(run(q, k, v).out, run(*turned, v).out, 2e-6)


def test_M35_mask_as_bias(run: Runner, dtype):
    q, k, v = problem(dtype)
    mask = torch.rand(3, 1, 70, 130) < 0.6
    mask[1, :, 5] = False
    bias = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    a, b = run(q, k, v, mask=mask), run(q, k, v, bias=bias)
    near(a.out, b.out, ROUNDING[dtype])
    assert torch.equal(a.lse == -math.inf, b.lse == -math.inf)
