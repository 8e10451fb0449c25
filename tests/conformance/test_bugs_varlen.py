"""Published defects of packed members and lengths, one test each (testing method §5); the name is the row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import polyflash
from polyflash import attention_varlen
from tests import device
from tests.conformance.gradients import gradients, hold, right_gradients
from tests.conformance.rows import DTYPES, Runner, ints, qkv
from tests.conformance.test_varlen import packed
from tests.memory import poisoned
from tests.tolerance import members, near, relative_l2, same_bits


def test_B_msk_05_mostly_empty_rows(backend: str):
    """github.com/Dao-AILab/flash-attention/issues/443: M ≫ N causal, D = 32, fp16 ×3, dO = 1."""
    q, k, v = (3 * x[0].transpose(0, 1) for x in qkv(1, 2, 256, 3, 32, dtype=torch.float16))
    bounds = {"cu_seqlens_q": ints(0, 76, 110, 256), "cu_seqlens_k": ints(0, 1, 2, 3)}
    dout, options = torch.ones_like(q), {"causal": True, **bounds}
    got = gradients(q, k, v, dout, backend=backend, **options)
    assert all(torch.isfinite(got[n]).all() for n in "qkv")
    alive = torch.zeros(256, dtype=torch.bool)
    alive[[75, 109, 255]] = True
    assert (got["q"][~alive] == 0).all()
    hold(got, q, k, v, dout, None, options, "B-msk-05")


def test_B_msk_10_fewer_keys_than_rows_per_member(run: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/1533: rows written with 0, not left as allocated."""
    q, k, v, bounds = packed((70, 70, 70), (130, 20, 1))
    out = torch.full(q.shape, math.nan)
    got = run(q, k, v, causal=True, out=out, **bounds)
    assert (got.out[70:120] == 0).all() and (got.out[140:209] == 0).all() and not got.out.isnan().any()
    run.checked(q, k, v, causal=True, **bounds)
    run.checked(q, k, v, causal=True, kv_lens=ints(69, 0, 1), **bounds)


def test_B_msk_18_an_empty_member_returns(run: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/1198: one request with no live key, causal and not."""
    q, k, v, bounds = packed((5, 1, 33), (40, 30, 129))
    for causal in (False, True):
        got = run.checked(q, k, v, causal=causal, kv_lens=ints(40, 0, 129), **bounds)
        assert (got.out[5] == 0).all() and (got.lse[:, 5] == -math.inf).all()


def test_B_msk_19_huge_scores(run: Runner):
    """github.com/thu-ml/SageAttention/pull/372: raw scores beyond 65504 in float16 are never stored in it."""
    q, k, v, bounds = packed((17, 33), (40, 65), dim=128, dtype=torch.float16)
    q, k = q.sign() * 3e3, k.sign() * 3e3
    got = run(q, k, v, causal=True, **bounds)
    assert torch.isfinite(got.out).all() and torch.isfinite(got.lse).all()


@pytest.mark.parametrize("repeat", range(3))
def test_B_emp_02_a_member_without_rows(backend: str, repeat: int):
    """github.com/Dao-AILab/flash-attention/pull/2421, and B-emp-03: dK, dV of its keys are 0, in poisoned
    memory."""
    q, k, v, bounds = packed((20, 0, 13), (30, 25, 40))
    with poisoned():
        got = gradients(q, k, v, torch.ones_like(q), backend=backend, causal=bool(repeat % 2), **bounds)
    assert all((got[n][30:55] == 0).all() and torch.isfinite(got[n]).all() for n in "kv")
    assert (got["k"][:30] != 0).any() and torch.isfinite(got["q"]).all()


def test_B_emp_06_decode_with_empty_members(run: Runner):
    """github.com/Dao-AILab/flash-attention/issues/1537: zero-length members and max_seqlen_q = 1."""
    for rows in ((1, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)):
        q, k, v, bounds = packed(rows, (40, 30, 0, 7), heads=(8, 2))
        got = run.checked(q, k, v, causal=True, max_seqlen_q=1, max_seqlen_k=40, **bounds)
        assert got.out.shape == (sum(rows), 8, 32)


def test_B_emp_07_fewer_rows_than_members(run: Runner):
    """github.com/Dao-AILab/flash-attention/issues/1619: GQA decode, total_q below the number of members."""
    for heads in ((8, 1), (8, 2), (6, 2)):
        q, k, v, bounds = packed((0, 1, 0, 0, 1, 0), (9, 130, 4, 0, 64, 1), heads=heads)
        run.checked(q, k, v, causal=True, label=f"{heads}", **bounds)


def test_B_emp_08_rows_without_keys_shift_nobody(run: Runner):
    """github.com/sgl-project/sglang/pull/22688: a member with rows and no keys, then normal ones."""
    for keys in ((0, 80, 33, 60), (80, 0, 0, 60), (0, 0, 0, 1)):
        q, k, v, bounds = packed((17, 5, 33, 1), keys)
        got = run.checked(q, k, v, causal=True, label=f"{keys}", **bounds)
        for at, of, (one_q, one_k, one_v, _) in members(q, k, v, bounds):
            if of.start == of.stop:
                assert (got.out[at] == 0).all() and (got.lse[:, at] == -math.inf).all()
            else:
                one = run(one_q, one_k, one_v, causal=True)
                near(got.out[at].transpose(0, 1)[None], one.out, 2e-6)


def test_B_emp_09_no_members_no_rows(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/2515: nothing divides by a number of tiles."""
    for rows, keys in (((), ()), ((0,), (0,)), ((0, 0), (7, 0)), ((3,), (0,)), ((0,), (9,))):
        q, k, v, bounds = packed((*rows, 0), (*keys, 0))
        for causal in (False, True):
            out, lse = run(q, k, v, causal=causal, **bounds)
            assert out.shape == q.shape and lse.shape == (4, sum(rows)) and (lse == -math.inf).all()
        inputs = [x.requires_grad_() for x in (q, k, v)]
        attention_varlen(*inputs, **bounds).sum().backward()
        assert all(x.grad.shape == x.shape and not x.grad.any() for x in inputs)


def test_B_big_10_more_members_than_a_grid_has_blocks(run: Runner):
    """github.com/Dao-AILab/flash-attention/issues/1786: more than 65535 members."""
    count = 70_000
    q, k, v, bounds = packed((1,) * count, (2,) * count, heads=(1, 1), dim=8)
    got = run(q, k, v, **bounds)
    s = torch.einsum("bhd,bjhd->bhj", q, k.view(count, 2, 1, 8)) / math.sqrt(8)
    want = torch.einsum("bhj,bjhd->bhd", s.softmax(-1), v.view(count, 2, 1, 8))
    assert relative_l2(got.out, want) < 2e-6
    torch.testing.assert_close(got.lse, s.logsumexp(-1).T, rtol=1e-5, atol=1e-5)


def test_B_pag_15_bounds_are_validated(run: Runner):
    """github.com/sgl-project/sgl-flash-attn/pull/47: falling, starting elsewhere, beyond the total."""
    q, k, v, _ = packed((20,), (30,))
    run(q, k, v, cu_seqlens_q=ints(0, 7, 20), cu_seqlens_k=ints(0, 30, 30))
    for wrong in ((0, 8, 7), (1, 7, 20), (-1, 7, 20), (0, 7, 2**31 - 1), (0, -(2**31), 20), (0, 21, 20)):
        for side, other in (("q", "k"), ("k", "q")):
            bounds = {f"cu_seqlens_{side}": ints(*wrong), f"cu_seqlens_{other}": ints(0, 7, 20)}
            if side == "k" and wrong == (0, 21, 20):
                bounds["cu_seqlens_k"] = ints(0, 31, 30)
            with pytest.raises(polyflash.SpecError, match=f"cu_seqlens_{side}"):
                run(q, k, v, checked=device.CONTENTS[-1], **bounds)


def test_B_spl_05_decode_lse_per_head_and_token(run: Runner):
    """github.com/vllm-project/flash-attention/pull/87: GQA decode over packed members, lse (heads, total)."""
    for dtype in DTYPES:
        q, k, v, bounds = packed((1, 3, 1, 2), (900, 65, 1, 1300), heads=(12, 2), dtype=dtype)
        run.checked(q, k, v, causal=True, label=str(dtype), **bounds)


def test_B_spl_06_lse_shape(run: Runner):
    """github.com/Dao-AILab/flash-attention/issues/876: (heads, total) packed, (batch, heads, rows) padded."""
    q, k, v, bounds = packed((17, 17), (40, 40))
    got = run(q, k, v, **bounds)
    wide = run(*(x.view(2, -1, *x.shape[1:]) for x in (q, k, v)), layout="bshd")
    assert got.lse.shape == (4, 34) and wide.lse.shape == (2, 4, 17)
    assert got.lse.is_contiguous() and got.lse.dtype is torch.float32
    near(got.lse, wide.lse.transpose(0, 1).flatten(1), 1e-6)


def test_B_cmp_05_lengths_are_not_constants():
    """github.com/zhuzilin/ring-flash-attention/pull/71: eager = compiled for three sets of lengths."""
    torch._dynamo.reset()

    def causal(*args: Any) -> Any:
        return attention_varlen(*args, causal=True)

    compiled = torch.compile(causal, fullgraph=True, backend="eager")
    for rows, keys in (((5, 9, 3), (7, 9, 20)), ((9, 5, 3), (9, 7, 20)), ((1, 15, 1), (30, 0, 6))):
        q, k, v, bounds = packed(rows, keys)
        got = compiled(q, k, v, *bounds.values())
        assert torch.equal(got, causal(q, k, v, *bounds.values())), (rows, keys)


@pytest.mark.parametrize("causal", (False, True))
def test_B_grad_12_short_members_odd_dim(backend: str, causal: bool):
    """github.com/fla-org/flash-linear-attention/issues/836: D = 100; dq was wrong, the forward pass right."""
    q, k, v, bounds = packed((15, 85, 200, 900, 800), (15, 85, 200, 900, 800), heads=(2, 2), dim=100)
    assert bounds["cu_seqlens_q"].tolist() == [0, 15, 100, 300, 1200, 2000]
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"causal": causal, **bounds}
    got = gradients(q, k, v, dout, backend=backend, **options)
    right = right_gradients(q, k, v, dout, None, options)
    for at, of, _ in members(q, k, v, bounds):
        for n, part in (("q", at), ("k", of), ("v", of)):
            assert relative_l2(got[n][part], right[n][part]) < 3e-6, (n, part)


def test_B_grad_15_repeatable(backend: str):
    """github.com/Dao-AILab/flash-attention/issues/414: §3.6 over packed members, window and GQA."""
    q, k, v, bounds = packed((17, 64, 1, 100), (40, 64, 130, 90), heads=(6, 2))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    options = {"causal": True, "window": (50, None), **bounds}
    runs = [gradients(q, k, v, dout, backend=backend, **options) for _ in range(10)]
    for other in runs[1:]:
        for n in "qkv":
            same_bits(other[n], runs[0][n], n)


def test_B_gqa_06_lse_of_odd_lengths(run: Runner):
    """xformers CHANGELOG 0.0.23: MQA, length % 64 == 1."""
    for keys in ((1, 65, 129), (129, 1, 65)):
        q, k, v, bounds = packed((1, 65, 129), keys, heads=(8, 1))
        for causal in (False, True):
            run.checked(q, k, v, causal=causal, label=f"{keys}", **bounds)
