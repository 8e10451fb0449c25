"""Real defects of other implementations: configs, caches, routes, compile, what comes from outside, by id.

Every report that a forward or backward pass on a CPU can repeat is a test of this folder, of tests/null,
tests/backends/cpu or tests/test_*.py, found by its id (B-msk-04, B_msk_04). Those that it cannot, and why:

    B-pag-01, 02, 04-07, 10-14, 16-20   page tables, appends, plans apart from their run, shared pages:
                                        there is no paged cache. S5 and S6 likewise
    B-q-01, 03-11, 13-16, 19            quantised storage, its scales and its backward pass; rows beyond the
                                        length (13) are P5 in test_memory.py
    B-big-03                            page number × page stride
    B-big-11                            a grid of 65535 places: 70000 items are B-big-09 and B-big-10
    B-spl-10, B-spl-12                  split kernels: items never split the keys, `merge` has no offsets
    B-cmp-04 (scores)                   scores changed by a function are not offered; its masks are below
    B-gph-*, B-dev-*, B-str-21          graphs, devices, memory freed under a kernel: a call returns when
                                        it is done
    B-str-20                            two streams on one buffer: two Python threads are B-cpu-01
    B-dst-*                             no ring; what one needs of lse and merge is B-spl-02 to B-spl-09
    B-wg-01, 04, 06-10, 12, B-glu-*     subgroups, barriers and asynchronous copies of a GPU
    B-wg-03                             square shapes hide swapped sizes: no sweep here is square alone
"""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import Mask, SpecError, backends, target, torch_ops
from polyflash.spec import AttentionSpec, Feature, Phase
from tests import device
from tests.conformance.rows import DTYPES, Runner, ints, qkv
from tests.memory import check_guarded
from tests.tolerance import check, expect, near, same_bits


def configs_of(run: Runner, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Every config the row's own list has for a problem."""
    module = importlib.import_module(run.row.module.rpartition(".")[0] + ".configs")
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    features = frozenset({Feature.CAUSAL, Feature.GQA, Feature.LSE})
    dtype = str(q.dtype).removeprefix("torch.")
    spec = AttentionSpec(Phase.FORWARD, dtype, device.DEVICE.type, *sizes, features, causal=True)
    found = tuple(dict.fromkeys(module.candidates(spec, device.here())))
    return found if device.DEVICE.type == "cpu" else found[:6]  # a GPU's take seconds each to compile


@pytest.mark.parametrize("group", (2, 4, 8))
def test_B_gqa_04_B_cch_08_every_config(run: Runner, group: int):
    """github.com/Dao-AILab/flash-attention/pull/2301, triton/issues/3004: each config, after any other."""
    run.skip_unless_here()
    q, k, v = qkv(1, (2 * group, 2), 70, 130, 64, seed=group)
    want, configs = expect(q, k, v, causal=True), configs_of(run, q, k, v)
    assert len(configs) > 1
    for config in configs:
        check(*run(q, k, v, causal=True, config=config), want, label=str(config))


def test_B_cch_07_first_call_of_a_shape(run: Runner):
    """github.com/triton-lang/triton/issues/781: the first call with a shape or config is the second, bit for
    bit, whatever the memory it gets held."""
    for rows, keys in ((3, 11), (37, 203), (67, 67)):
        q, k, v = qkv(1, 2, rows, keys, 24, seed=rows)
        for config in (None, *configs_of(run, q, k, v)[:2]):
            first = run(q, k, v, causal=True, config=config, out=torch.full((1, 2, rows, 24), math.nan))
            second = run(q, k, v, causal=True, config=config, out=torch.full((1, 2, rows, 24), 3.0))
            same_bits(first.out, second.out)
            same_bits(first.lse, second.lse)


def test_B_cch_02_a_route_knows_which_operands_there_are():
    """A plain call, then one with an operand, then the plain one again: two routes."""
    q, k, v = qkv(1, 2, 20, 40, 16)
    torch_ops._routes.clear()
    plain = polyflash.attention(q, k, v)
    dropped = polyflash.attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(dropped, plain) and len(torch_ops._routes) == 2
    same_bits(polyflash.attention(q, k, v), plain)


def test_the_engine_is_chosen_without_a_name():
    """The first row of the table that can run a call does, and not the last resort."""
    q, k, v = qkv(1, 2, 20, 40, 16)
    plan = polyflash.explain(q, k, v)
    able = [verdict.row for verdict in plan.verdicts if not verdict.reasons]
    assert plan.chosen is max(able, key=lambda row: row.priority)
    assert len(able) > 1 or not target.detect("cpu").has_package("numba")
    assert {row.backend for row in backends.TABLE} >= {"cpu", "torch"}


def test_B_str_07_lse_of_split_odd_rows(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/2388: keys in parts, odd numbers of rows, each row's lse."""
    for rows in (1, 3, 17, 33, 65, 129):
        q, k, v = qkv(2, (6, 2), rows, 200, 32, seed=rows)
        whole = run(q, k, v)
        for cuts in ((100,), (1, 67), (64, 128, 199)):
            edges = (0, *cuts, 200)
            out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf)
            for begin, end in itertools.pairwise(edges):
                out, lse = polyflash.merge(out, lse, *run(q, k[:, :, begin:end], v[:, :, begin:end]))
            torch.testing.assert_close(lse, whole.lse, rtol=1e-5, atol=1e-5)
            near(out, whole.out, 2e-6, f"{rows} rows, cuts {cuts}")


def test_B_big_14_strides_below_zero_and_zero(run: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/2134: torch makes no negative stride, so none gets here;
    packed keys of stride 0 are one key many times."""
    with pytest.raises(ValueError, match="negative"):
        torch.from_numpy(np.zeros((4, 2, 8), dtype=np.float32)[::-1])
    bounds = {
        "cu_seqlens_q": ints(0, 3, 5),
        "cu_seqlens_k": ints(0, 7, 9),
        "max_seqlen_q": 3,
        "max_seqlen_k": 7,
    }
    q, one = torch.randn(5, 4, 16), torch.randn(1, 2, 16)
    spread = one.expand(9, 2, 16)
    got = run(q, spread, spread, **bounds)
    same_bits(got.out, run(q, spread.contiguous(), spread.contiguous(), **bounds).out)
    near(got.out, one.repeat_interleave(2, 1).expand(5, 4, 16), 1e-6)


def test_B_cau_05_both_flags_backward():
    """github.com/triton-lang/triton/issues/4541: a backward pass that ignores causal=False. Every row has a
    visible key, so Σ_j dV = Σ_i dO; and only causal rows keep their gradients from later keys."""
    for causal in (False, True):
        q, k, v = (x.requires_grad_() for x in qkv(1, 2, 30, 30, 16))
        out = polyflash.attention(q, k, v, causal=causal)
        dout = torch.zeros_like(out)
        dout[:, :, :10] = 1
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        near(dv.sum(2), dout.sum(2), 1e-5)
        assert bool((dv[:, :, 10:] != 0).any()) is not causal
        assert bool((dk[:, :, 10:] != 0).any()) is not causal and bool((dq[:, :, 10:] == 0).all())


def test_B_pag_03_nan_beyond_the_length(step: Runner):
    """github.com/Dao-AILab/flash-attention/issues/1745: the tail of the last tile of V is NaN."""
    for dtype in DTYPES:
        for live in (1, 15, 17, 63, 65, 127, 129):
            q, k, v = qkv(1, (4, 2), 4, 130, 32, dtype=dtype)
            want = step(q, k, v, kv_lens=ints(live))
            k[:, :, live:], v[:, :, live:] = math.nan, math.nan
            same_bits(step(q, k, v, kv_lens=ints(live)).out, want.out, f"{dtype} {live}")


@pytest.mark.parametrize("longest", (0, 1, 3))
def test_B_pag_08_the_longest_member_anywhere(run: Runner, longest: int):
    """github.com/flashinfer-ai/flashinfer/pull/1930: tiles counted from the wrong member."""
    rows, keys = [3, 1, 17, 2], [5, 33, 20, 9]
    rows[longest], keys[longest] = 150, 160
    bounds = {
        "cu_seqlens_q": torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, *np.cumsum(keys)], dtype=torch.int32),
    }
    q, k, v = torch.randn(sum(rows), 4, 32), torch.randn(sum(keys), 2, 32), torch.randn(sum(keys), 2, 32)
    for lengths in ({}, {"max_seqlen_q": max(rows), "max_seqlen_k": max(keys)}):
        run.checked(
            q, k, v, causal=True, **bounds, **{**{"max_seqlen_q": None, "max_seqlen_k": None}, **lengths}
        )


def test_B_pag_09_wide_metadata():
    """github.com/flashinfer-ai/flashinfer/pull/1492: int64 where int32 is read; and read in full here."""
    q, k, v = qkv(2, 2, 4, 8, 16)
    lens = torch.tensor((3, 4))
    for name in ("kv_lens", "kv_starts", "q_offset"):
        want = polyflash.attention(q, k, v, causal=True, **{name: lens.int()})
        same_bits(polyflash.attention(q, k, v, causal=True, **{name: lens}), want)
    x, bounds = torch.randn(8, 2, 16), torch.tensor((0, 3, 8))
    want = polyflash.attention_varlen(x, x, x, bounds.int(), bounds.int(), max_seqlen_q=8)
    same_bits(polyflash.attention_varlen(x, x, x, bounds, bounds, max_seqlen_q=8), want)
    with pytest.raises(SpecError, match="32 bits"):
        polyflash.attention_varlen(x, x, x, bounds, bounds + 2**32)


def test_B_cmp_01_the_op_has_a_fake_kernel():
    """github.com/Comfy-Org/ComfyUI/issues/15044; every option: test_torch_ops.py."""
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    x = torch.randn(1, 2, 5, 8)
    torch.library.opcheck(
        torch.ops.polyflash.attention.default, (x, x, x, True, None, True), test_utils=checks
    )


def test_B_cmp_03_compiled_under_inference_mode(run: Runner):
    """github.com/pytorch/pytorch/issues/124111."""
    q, k, v = qkv(1, (4, 2), 9, 20, 16)
    want = run(q, k, v, causal=True)
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return polyflash.attention(q, k, v, causal=True, return_lse=True, backend=run.row.backend)

    with torch.inference_mode():
        got = torch.compile(call, backend="aot_eager")(q, k, v)
    same_bits(got[0], want.out)
    same_bits(got[1], want.lse)


@pytest.mark.parametrize("seqlen", (64, 1025))
def test_B_cmp_04_compiled_block_masks(run: Runner, seqlen: int):
    """github.com/pytorch/pytorch/issues/153799 and /159247: N = 1025, and N = 64 under blocks of 128 keys."""
    blocks = -(-seqlen // 128)
    mask = Mask.blocks(torch.ones(blocks, blocks, dtype=torch.bool).tril(), rows=128, keys=128)
    q, k, v = qkv(1, 1, seqlen, seqlen, 16)
    want = run.checked(q, k, v, mask=mask)
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return polyflash.attention(q, k, v, mask=mask, backend=run.row.backend)

    with torch.no_grad():
        same_bits(torch.compile(call, backend="aot_eager")(q, k, v), want.out)


def test_B_wg_11_odd_numbers_of_elements(run: Runner):
    """github.com/gpuweb/gpuweb/issues/5062: 16-bit tensors whose bytes are no multiple of 4."""
    for dtype in DTYPES:
        for rows, keys, dim, dim_v in ((1, 1, 1, 1), (3, 5, 7, 9), (1, 17, 3, 5)):
            q, k, v = qkv(1, 1, rows, keys, dim, dim_v, dtype=dtype)
            run.checked(q, k, v, label=f"{rows} {keys} {dim} {dim_v} {dtype}")
            check_guarded(run, q, k, v, {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_round_to_nearest_even(run: Runner, dtype: torch.dtype):
    """Weights of one half are exact, so the result is the mean of two values, rounded once. Matrix units of
    GPUs, which multiply float32 in parts, cut sums off instead: there it is one of the two."""
    first = torch.randn(1, 1, 1, 64, dtype=torch.float64).to(dtype)
    second = torch.nextafter(first.float(), torch.tensor(9.0)).to(dtype) if dtype is torch.float32 else None
    if second is None:
        second = (first.view(torch.int16) + 1).view(dtype)  # its neighbour: every mean is a tie
    out = run(
        torch.zeros(1, 1, 1, 8, dtype=dtype),
        torch.zeros(1, 1, 2, 8, dtype=dtype),
        torch.cat((first, second), 2),
    )
    if dtype is torch.float32 and not device.ON_A_CPU:
        assert bool(((out.out == first) | (out.out == second)).all())
    else:
        same_bits(out.out, ((first.double() + second.double()) / 2).to(dtype))


def test_a_bias_of_minus_infinity_hides_any_score(run: Runner):
    """A key hidden by bias is absent like any other: NaN or Inf of its K and V change no bit."""
    q, k, v = qkv(1, (4, 2), 20, 70, 16)
    bias = torch.randn(1, 4, 20, 70)
    bias[..., 5] = bias[..., 66] = -math.inf
    want = run.checked(q, k, v, bias=bias)
    for value in (math.nan, math.inf, -math.inf):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, :, (5, 66)] = bad_v[:, :, (5, 66)] = value
        got = run(q, bad_k, bad_v, bias=bias)
        same_bits(got.out, want.out, f"{value}")
        same_bits(got.lse, want.lse, f"{value}")


def test_documents_of_decode_rows(run: Runner):
    """All rows of one document, keys of several in a tile: ranges of ids that meet are not equality."""
    for rows in (1, 5, 40):
        q, k, v = qkv(2, 2, rows, 130, 16)
        k_ids = (torch.arange(130) // 9 % 4).int().expand(2, -1)
        for document in range(4):
            q_ids = torch.full((2, rows), document, dtype=torch.int32)
            got = run.checked(q, k, v, mask=Mask.segments(q_ids, k_ids), label=f"{rows} {document}")
            own = k_ids[0] == document
            near(got.out, run(q, k[:, :, own], v[:, :, own]).out, 2e-6)


def test_lists_that_overlap_are_refused(run: Runner):
    """Two intervals of a list that share a key would count it twice."""
    q, k, v = qkv(1, 1, 8, 40, 16)
    mask = Mask.intervals(ints(0, 10)[None], ints(20, 30)[None], rows=8)
    with pytest.raises(SpecError, match="disjoint"):
        run(q, k, v, mask=mask, checked=True)  # contents on a GPU are read then alone


def test_tiles_of_a_bool_mask_of_every_kind(run: Runner):
    """Tiles all hidden, mixed and all visible, in another order in each head of a group: what
    is skipped, changed or left alone is that tile of that head."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.stack([torch.randperm(9, generator=generator).view(3, 3) % 3 for _ in range(4)])
    kinds = kinds.repeat_interleave(128, 1).repeat_interleave(128, 2)[None]
    mask = (kinds == 2) | ((kinds == 1) & (torch.rand(kinds.shape, generator=generator) < 0.5))
    q, k, v = qkv(1, (4, 1), 384, 384, 16)
    run.checked(q, k, v, mask=mask, label="heads of their own")
    run.checked(q, k, v, mask=mask[:, 1:2], label="one for all heads")


def test_B_msk_20_a_fall_beyond_the_exponent(run: Runner):
    """Scores that fall by 150 from tile to tile: a maximum lowered to the last tile's would overflow."""
    q, k, v = qkv(1, 1, 20, 400, 8)
    q[..., 0], k[..., 0] = 8**0.5, -150.0 * (torch.arange(400) // 64)
    run.checked(q, k, v)
    run.checked(q, k.flip(2), v.flip(2), label="rising")
