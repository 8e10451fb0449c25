"""Real defects of other implementations: head dims, groups, strides, sizes, LSE, caches, threads. Named by
id."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import torch_ops
from polyflash.spec import MANY_KEYS
from polyflash.work import work_of
from polyflash.workloads import Workload
from tests import processes
from tests.conformance.rows import DTYPES, Runner, ints, qkv
from tests.memory import check_guarded, poisoned
from tests.tolerance import near, same_bits, same_of_other_strides


def test_B_dim_01_every_channel_counts(run: Runner):
    """github.com/triton-lang/triton/issues/621: a change in any channel of q or v changes the result."""
    for dim in (63, 80, 128, 256):
        q, k, v = qkv(1, 1, 3, 20, dim)
        base = run(q, k, v).out
        for channel in (0, dim // 2, dim - 1):
            moved, raised = q.clone(), v.clone()
            moved[..., channel] += 3
            raised[..., channel] += 3
            assert not torch.equal(run(moved, k, v).out, base), (dim, channel)
            changed = (run(q, k, raised).out != base).any(2).flatten()
            assert changed.nonzero().flatten().tolist() == [channel]


@pytest.mark.parametrize("dim", (63, 80, 96, 8, 16))
def test_B_dim_02_B_dim_03_B_dim_04_odd_dims(run: Runner, dim: int):
    """github.com/66RING/tiny-flash-attention/issues/12: no leak from the neighbouring head."""
    q, k, v = qkv(2, (4, 2), 40, 70, dim)
    run.checked(q, k, v, causal=True)
    check_guarded(run, q, k, v, {})


def test_B_dim_06_shape_of_the_result(run: Runner):
    """github.com/pytorch/pytorch/issues/176767: (…, D_v), on fake tensors too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = qkv(2, (4, 2), 5, 7, 16, 24)
    real = run(q, k, v)
    assert real.out.shape == (2, 4, 5, 24)
    with FakeTensorMode() as mode:
        fake = polyflash.attention(*(mode.from_tensor(x) for x in (q, k, v)), return_lse=True)
    assert fake.out.shape == real.out.shape and fake.lse.shape == real.lse.shape


def test_B_cmp_02_fake_strides_are_the_real_ones(run: Runner):
    """github.com/pytorch/pytorch/pull/178986: shape, strides and dtype of result and lse, over all orders of
    q."""
    from itertools import permutations

    from torch._subclasses.fake_tensor import FakeTensorMode

    base = qkv(2, (4, 2), 5, 7, 16, 24)
    for order in permutations(range(4)):
        back = [order.index(i) for i in range(4)]
        q, k, v = (x.permute(order).contiguous().permute(back) for x in base)
        real = run(q, k, v)
        with FakeTensorMode() as mode:
            fake = polyflash.attention(*(mode.from_tensor(x) for x in (q, k, v)), return_lse=True)
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), order


def test_B_gqa_02_B_gqa_05_kv_head_of_a_query_head(run: Runner):
    """github.com/LMCache/LMCache/pull/3092: values that name their kv head."""
    for heads, kv_heads in ((12, 2), (6, 1), (7, 7), (24, 2), (10, 2)):
        q, k, _ = qkv(1, (heads, kv_heads), 5, 9, 16)
        v = torch.arange(kv_heads).float().view(1, -1, 1, 1).expand(1, kv_heads, 9, 16)
        want = (torch.arange(heads) // (heads // kv_heads)).float().view(1, -1, 1, 1).expand(1, heads, 5, 16)
        near(run(q, k, v).out, want, 1e-6, f"{heads}/{kv_heads}")


def test_B_gqa_03_reads_stay_inside_the_kv_heads(run: Runner):
    """github.com/pytorch/pytorch/issues/149132."""
    for rows in (1, 3, 40):
        q, k, v = qkv(2, (12, 2), rows, 70, 64)
        check_guarded(run, q, k, v, {"causal": True})


def test_B_gqa_06_lse_of_odd_lengths(run: Runner):
    """xformers CHANGELOG 0.0.23: MQA, length % 64 == 1."""
    for rows in (1, 65, 129):
        for keys in (1, 65, 129):
            q, k, v = qkv(2, (8, 1), rows, keys, 32)
            run.checked(q, k, v, label=f"{rows}x{keys}")


def test_B_gqa_07_default_scale(run: Runner):
    """github.com/BobMcDear/attorch/issues/14: 1/sqrt(head_dim), not a constant."""
    for dim in (4, 16, 100):
        q, k, v = qkv(2, 2, 9, 20, dim)
        near(run(q, k, v).out, run(q, k, v, scale=dim**-0.5).out, 1e-6)


def test_B_str_05_merge_of_different_layouts():
    """github.com/local-inference-lab/vllm/pull/17."""
    a, b = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    la, lb = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    want = polyflash.merge(a, la, b, lb)
    strided = b.transpose(1, 2).contiguous().transpose(1, 2)
    other_lse = lb.transpose(1, 2).contiguous().transpose(1, 2)
    same_bits(polyflash.merge(a, la, strided, other_lse).out, want.out)
    views = [x.transpose(1, 2) for x in (a, b)]
    bshd = polyflash.merge(views[0], la, views[1], lb, layout="bshd")
    same_bits(bshd.out.transpose(1, 2), want.out)


def test_B_str_06_decode_into_bshd(step: Runner):
    """github.com/flagos-ai/FlagGems/issues/5235: contiguous (B,S,H,D) result of decode shapes, guards
    intact."""
    q, k, v = qkv(3, (8, 2), 1, 300, 64)
    whole = torch.full((5, 1, 8, 64), math.inf)
    out = whole[1:4]
    got = step(*(x.transpose(1, 2) for x in (q, k, v)), layout="bshd", out=out)
    assert (whole[0] == math.inf).all() and (whole[4] == math.inf).all()
    near(got.out.transpose(1, 2), step(q, k, v).out, 1e-6)


def test_B_str_09_alignment_of_the_second_call(run: Runner):
    """github.com/triton-lang/triton/issues/1330: aligned first, then one element off, for every operand
    alone."""
    tensors = qkv(2, (4, 2), 40, 70, 64)
    want = run(*tensors, causal=True)
    for which in range(3):
        moved = list(tensors)
        buffer = torch.zeros(tensors[which].numel() + 1)
        moved[which] = buffer[1:].view(tensors[which].shape).copy_(tensors[which])
        same_bits(run(*moved, causal=True).out, want.out)


def test_B_str_10_expanded_lengths_and_mask(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/2189: stride 0 in auxiliary tensors."""
    q, k, v = qkv(3, 2, 20, 60, 16)
    lens = ints(41).expand(3)
    mask = (torch.rand(1, 1, 1, 60) < 0.5).expand(3, 2, 20, 60)
    for given, dense in (
        ({"kv_lens": lens}, {"kv_lens": lens.clone()}),
        ({"causal": True, "q_offset": lens}, {"causal": True, "q_offset": lens.clone()}),
        ({"mask": mask}, {"mask": mask.contiguous()}),
    ):
        same_of_other_strides(run.row.backend, run(q, k, v, **given).out, run(q, k, v, **dense).out)
    every_second = torch.zeros(6, dtype=torch.int32)
    every_second[::2] = ints(60, 3, 41)
    run.checked(q, k, v, kv_lens=every_second[::2])


def test_B_str_11_strides_at_head_dim_256(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/2545: the specialised variant too."""
    for dtype in DTYPES:
        q, k, v = (
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, (2, 1), 40, 70, 256, dtype=dtype)
        )
        want = run(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
        same_bits(run(q, k, v, causal=True).out, want.out)


# Sizes. Virtual memory is reserved, only the touched pages are committed; poison is off or it would touch
# them all.


def reserved(elements: int, dtype: torch.dtype) -> Tensor:
    with poisoned(False):
        return torch.empty(elements, dtype=dtype)


def spread(x: Tensor, stride: int, dim: int) -> Tensor:
    """A copy of `x` (1, 1, seqlen, head_dim) whose `dim` has a stride of `stride` elements."""
    strides = list(x.contiguous().stride())
    strides[dim] = stride
    span = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    return reserved(span, x.dtype).as_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_B_big_01_B_big_07_row_offsets_beyond_31_bits(run: Runner, dtype: torch.dtype):
    """github.com/thu-ml/SageAttention/issues/386: (S - 1)·stride > 2³¹ elements, in q, k and v at once."""
    q, k, v = qkv(1, 1, 33, 33, 16, dtype=dtype)
    stride = 2**31 // 32 + 4099
    if dtype is torch.float32:
        stride = 2**29 // 32 + 4099  # bytes, not elements, pass 2³¹
    want = run(q, k, v, causal=True)
    views = [spread(x, stride, 2) for x in (q, k, v)]
    assert (33 - 1) * stride * q.element_size() > 2**31
    same_bits(run(*views, causal=True).out, want.out)


def test_B_big_02_B_big_05_batch_and_head_offsets(step: Runner):
    """github.com/sgl-project/sglang/issues/20389, github.com/Dao-AILab/flash-attention/issues/772."""
    q, k, v = qkv(2, (4, 2), 4, 20, 16, dtype=torch.float16)
    want = step(q, k, v)
    for dim, stride in ((0, 2**31 + 5), (1, 2**31 // 2 + 3)):
        same_bits(step(q, spread(k, stride, dim), spread(v, stride, dim)).out, want.out, f"dimension {dim}")
    same_bits(step(spread(q, 2**31 + 5, 0), k, v).out, want.out)
    out = reserved(2**31 + 5 + 4 * 4 * 16, torch.float16).as_strided(q.shape, (2**31 + 5, 64, 16, 1))
    same_bits(step(q, k, v, out=out).out, want.out)


def test_B_big_12_sequence_major_cache(step: Runner):
    """github.com/pytorch/pytorch/issues/190857: K, V stored [N, B, D], viewed as [B, 1, N, D]."""
    q, k, v = qkv(1, 1, 3, 65, 16, dtype=torch.bfloat16)
    stride = 2**31 // 64 + 77
    same_bits(step(q, spread(k, stride, 2), spread(v, stride, 2)).out, step(q, k, v).out)


@pytest.mark.parametrize("which", ("mask", "bias"))
def test_B_big_06_B_big_15_mask_offsets(run: Runner, which: str):
    """github.com/flashinfer-ai/flashinfer/pull/1290, pytorch/issues/187227: row·stride beyond 2³²
    elements."""
    rows, keys, stride = 66, 70, 2**32 // 64 + 129
    q, k, v = qkv(1, 1, rows, keys, 16)
    small = torch.rand(1, 1, rows, keys) < 0.5
    if which == "bias":
        small = torch.randn(1, 1, rows, keys).half()
    wide = spread(small, stride, 2)
    assert (rows - 1) * stride > 2**32
    same_bits(run(q, k, v, **{which: wide}).out, run(q, k, v, **{which: small}).out)


def test_B_big_04_work_is_counted_in_wide_integers():
    """github.com/Dao-AILab/flash-attention/pull/2662: N = 2²², D = 128: exact host arithmetic without
    data."""
    n = 2**22
    spec = Workload("big", frozenset(), 1, 1, 1, n, n, 128, dtype="bfloat16", causal=True).spec()
    assert work_of(spec).flops == 4.0 * 128 * (n * (n + 1) // 2)


@pytest.mark.parametrize("shape", [(65536, 1), (1, 65536), (70000, 1)], ids=str)
def test_B_big_08_B_big_09_many_heads(step: Runner, shape: tuple[int, int]):
    """github.com/pytorch/pytorch/issues/142228, flashinfer/issues/3125: B·H from 65536 on; the last one is
    done."""
    batch, heads = shape
    q, k, v = qkv(batch, heads, 1, 2, 4)
    out, lse = step(q, k, v)
    s = torch.einsum("bhid,bhjd->bhij", q, k) / 2
    near(out, torch.softmax(s, -1) @ v, 1e-6)
    near(lse, torch.logsumexp(s, -1), 1e-6)


@pytest.mark.slow
def test_B_big_13_long_bf16(run: Runner):
    """github.com/pytorch/pytorch/issues/121558: N = 133120; last rows against a float64 oracle."""
    n = 133_120
    q, k, v = qkv(1, 1, n, n, 16, dtype=torch.bfloat16)
    out, lse = run(q[:, :, -300:], k, v, causal=True)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    run.checked(q[:, :, -300:], k, v, causal=True)


# LSE and split work.


def test_B_spl_01_one_row_257_keys(step: Runner):
    """github.com/Dao-AILab/flash-attention/issues/1076."""
    for dtype in DTYPES:
        q, k, v = qkv(1, 1, 1, 257, 32, dtype=dtype)
        step.checked(q, k, v)
        check_guarded(step, q, k, v, {})


def test_B_spl_02_lse_is_natural(step: Runner):
    """github.com/vllm-project/vllm/issues/28840: two equal scores of 0 give ln 2, not 1."""
    zero = torch.zeros(1, 1, 1, 8)
    lse = step(zero, zero.expand(1, 1, 2, 8), zero.expand(1, 1, 2, 8)).lse
    assert abs(float(lse) - math.log(2)) <= 1e-7


def test_B_spl_04_weights_sum_to_one(step: Runner):
    """github.com/vllm-project/flash-attention/pull/142: no key counted twice, at any length."""
    for keys in (1, 17, 64, 129, 500, 1023, 2049):
        q, k, v = qkv(2, (4, 2), 3, keys, 16)
        out, _ = step.checked(q, k, torch.ones_like(v), label=f"{keys} keys")
        assert float((out - 1).abs().max()) <= 6e-7  # what eager float32 reaches


def test_B_spl_05_B_spl_06_B_spl_09_decode_lse_per_head(step: Runner):
    """github.com/vllm-project/flash-attention/pull/87: lse (batch, heads, rows), batch 3, groups, chunks of
    rows."""
    for rows in (1, 2):
        q, k, v = qkv(3, (12, 4), rows, 700, 16)
        got = step.checked(q, k, v, causal=True, kv_lens=ints(700, 3, 350))
        assert got.lse.shape == (3, 12, rows)
        for h in range(12):
            own = slice(h // 3, h // 3 + 1)
            one = step(q[:, h : h + 1], k[:, own], v[:, own], causal=True, kv_lens=ints(700, 3, 350))
            near(one.lse[:, 0], got.lse[:, h], 1e-6)


def test_B_spl_11_lengths_inside_a_tile(step: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/1206."""
    q, k, v = qkv(6, (4, 2), 1, 1100, 16)
    step.checked(q, k, v, kv_lens=ints(1, 127, 513, 1000, 1099, 1100))


# Caches, threads.


def test_B_cch_01_constants_are_not_baked_in(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/2402: A, B, A with other scalars."""
    q, k, v = qkv(1, (4, 2), 40, 70, 16)
    for one, two in (
        ({"scale": 0.1}, {"scale": 0.7}),
        ({"window": (3, 1)}, {"window": (30, 9)}),
        ({"causal": True, "q_offset": 3}, {"causal": True, "q_offset": 25}),
        ({"kv_lens": ints(70)}, {"kv_lens": ints(11)}),
    ):
        first = run.checked(q, k, v, **one)
        run.checked(q, k, v, **two)
        same_bits(run(q, k, v, **one).out, first.out, str(one))


def test_B_cch_01_softcap_is_not_baked_in(run: Runner):
    q, k, v = qkv(1, (4, 2), 40, 70, 16)
    first = run.checked(q, k, v, softcap=1.0)
    run.checked(q, k, v, softcap=7.0)
    run.checked(q, k, v)
    same_bits(run(q, k, v, softcap=1.0).out, first.out)


def test_B_cch_02_every_operand_on_and_off(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/2143: any option after any other gives what it gives
    alone."""
    q, k, v = qkv(2, (4, 2), 20, 70, 16)
    candidates: dict[str, Any] = {
        "causal": True,
        "window": (9, 3),
        "mask": torch.rand(2, 1, 1, 70) < 0.6,
        "bias": torch.randn(1, 4, 1, 70),
        "alibi_slopes": torch.rand(4),
        "sinks": torch.randn(4),
        "softcap": 3.0,
        "kv_lens": ints(70, 30),
        "kv_starts": ints(0, 4),
        "q_offset": ints(50, 8),
        "scale": 0.4,
    }
    options = {name: x for name, x in candidates.items() if not run.reasons(q, k, v, **{name: x})}
    assert {"causal", "window", "mask", "kv_lens", "kv_starts", "q_offset"} <= options.keys() or run.reasons(
        q, k, v
    )
    alone = {name: run.checked(q, k, v, **{name: x}).out for name, x in options.items()}
    for first, x in options.items():
        for second, y in options.items():
            run(q, k, v, **{first: x})
            same_bits(run(q, k, v, **{second: y}).out, alone[second], f"{second} after {first}")


def test_B_cch_03_B_cch_06_decode_adds_no_route(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/2507, flashinfer/pull/2140: 50 lengths, no new cache
    entry."""
    q, k, v = qkv(1, (4, 2), 1, MANY_KEYS, 16)
    run(q, k[:, :, :100], v[:, :, :100], causal=True)
    before = len(torch_ops._routes)
    for n in range(101, MANY_KEYS, 8):  # one class of lengths
        run(q, k[:, :, :n], v[:, :, :n], causal=True)
    assert len(torch_ops._routes) == before


def test_M32_threads_one_and_many_are_equal(run: Runner):
    """B-cpu-02: the bits do not depend on the number of threads."""
    before = torch.get_num_threads()
    try:
        for dtype in DTYPES:
            for shape in (
                (1, (2, 2), 300, 300),
                (2, (8, 2), 1, 700),
                (1, (1, 1), 130, 1100),
                (3, (6, 2), 65, 65),
            ):
                q, k, v = qkv(*shape, 64, dtype=dtype)
                results = []
                for threads in (1, 2, 4):
                    torch.set_num_threads(threads)
                    results.append(run(q, k, v, causal=True))
                for other in results[1:]:
                    same_bits(other.out, results[0].out, f"{shape} {dtype}")
                    same_bits(other.lse, results[0].lse, f"{shape} {dtype}")
    finally:
        torch.set_num_threads(before)


def test_determinism_under_noise(run: Runner):
    """§3.6: 25 runs with allocations between them, bitwise equal."""
    q, k, v = qkv(2, (8, 2), 130, 200, 64)
    want = run(q, k, v, causal=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        noise = torch.empty(int(torch.randint(1, 200_000, (), generator=generator)))
        got = run(q, k, v, causal=True)
        same_bits(got.out, want.out)
        same_bits(got.lse, want.lse)
        del noise


def test_B_cpu_01_two_python_threads(run: Runner):
    """github.com/numba/numba/issues/2804: concurrent callers, one of a decode step, none disturbed."""
    run.skip_unless_here()
    problems = [qkv(1, (4, 2), rows, keys, 64, seed=rows) for rows, keys in ((130, 200), (1, 300))]
    how: dict[str, Any] = {"causal": True, "return_lse": True, "backend": run.row.backend}
    wants = [polyflash.attention(*p, **how) for p in problems]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(100):
                got = polyflash.attention(*problems[index], **how)
                same_bits(got.out, wants[index].out)
                same_bits(got.lse, wants[index].lse)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "hangs"
    assert not failures, failures[0]


def test_fork_after_use(run: Runner):
    """P23: a child forked after the first call either works or raises; it does not hang."""
    run.skip_unless_here()
    script = f"""
import os, torch, polyflash
q = torch.randn(1, 4, 300, 64)
want = polyflash.attention(q, q, q, backend={run.row.backend!r})
pid = os.fork()
if pid == 0:
    try:
        torch.set_num_threads(1)
        same = torch.equal(polyflash.attention(q, q, q, backend={run.row.backend!r}), want)
        os._exit(0 if same else 3)
    except Exception:
        os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = processes.begun(["-c", script], timeout=60)
    assert done.returncode == 0, done.stderr


def test_B_wg_05_head_dim_above_the_bound(run: Runner):
    """github.com/microsoft/onnxruntime/issues/27996: right or refused, never channels dropped."""
    q, k, v = qkv(1, 2, 20, 30, 320, 272)
    if run.reasons(q, k, v):
        with pytest.raises(polyflash.UnsupportedError, match="head_dim"):
            polyflash.attention(q, k, v, backend=run.row.backend)
        near(polyflash.attention(q, k, v), polyflash.attention(q, k, v, backend="torch"), 1e-6)
    else:
        run.checked(q, k, v)
