"""Packed members: against the oracle, a loop, and padding; nothing crosses from one to another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.catalogue import named, with_dtype, workloads
from tests.conformance.gradients import checked, gradients
from tests.conformance.rows import DTYPES, NAMES, Runner, ints, qkv
from tests.families import make
from tests.memory import check_guarded, check_hidden
from tests.tolerance import members, near, relative_l2, same_bits

PACKED = tuple(w.name for w in workloads("varlen"))
# A member's figure differs from a padded one's by the tiles it is cut into.
REORDERED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def packed(
    rows: tuple[int, ...], keys: tuple[int, ...], heads: tuple[int, int] = (4, 2), dim: int = 32, **kinds: Any
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Members of these lengths, without a tail."""
    q, k, v = (x[0].transpose(0, 1) for x in qkv(1, heads, sum(rows), sum(keys), dim, **kinds))
    bounds = {name: torch.tensor((0, *n)).cumsum(0).int() for name, n in (("q", rows), ("k", keys))}
    return q, k, v, {f"cu_seqlens_{name}": x for name, x in bounds.items()}


@pytest.mark.parametrize("dtype", (*NAMES, "float64"))
@pytest.mark.parametrize("name", PACKED)
def test_members(run: Runner, name: str, dtype: str):
    workload = with_dtype(named(name), dtype)
    run.skip_unless(workload)
    q, k, v, options = make(workload, seed=1)
    run.checked(q, k, v, label=name, **options)


@pytest.mark.parametrize(
    "family", ("x10", "sharp", "sparse", "vbias", "rising", "falling", "equal", "nanrow")
)
def test_families(run: Runner, family: str):
    for dtype in NAMES:
        workload = with_dtype(named("packed-causal"), dtype)
        run.skip_unless(workload)
        q, k, v, options = make(workload, family=family)
        run.checked(q, k, v, label=family, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ("packed", "packed-causal", "packed-window", "packed-lens", "packed-everything")
)
def test_M27_packed_is_a_loop(run: Runner, name: str, dtype: torch.dtype):
    """Every member is the call on it alone."""
    workload = with_dtype(named(name), str(dtype).removeprefix("torch."))
    run.skip_unless(workload)
    q, k, v, options = make(workload)
    got = run(q, k, v, **options)
    for at, _, (one_q, one_k, one_v, own) in members(q, k, v, options):
        if at.start == at.stop:
            continue
        one = run(one_q, one_k, one_v, **own)
        near(got.out[at].transpose(0, 1)[None], one.out, REORDERED[dtype], f"{name} {at}")
        assert torch.equal(got.lse[:, at] == -torch.inf, one.lse[0] == -torch.inf)
        torch.testing.assert_close(got.lse[:, at], one.lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", (False, True, "top_left"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_M27_packed_is_padded_with_lengths(run: Runner, dtype: torch.dtype, causal: bool | str):
    """Padded to the longest, live keys by kv_lens; padded rows stand before the real ones, which the
    alignment then leaves alone."""
    rows, keys = (17, 1, 64, 5), (40, 64, 65, 1)
    q, k, v, bounds = packed(rows, keys, dtype=dtype)
    got = run(q, k, v, causal=causal, **bounds)
    wide_q = q.new_zeros(4, 64, *q.shape[1:])
    wide_k, wide_v = (x.new_full((4, 65, *x.shape[1:]), math.nan) for x in (k, v))
    for b, (at, of, _) in enumerate(members(q, k, v, bounds)):
        start = 0 if causal == "top_left" else 64 - rows[b]
        wide_q[b, start : start + rows[b]] = q[at]
        wide_k[b, : keys[b]], wide_v[b, : keys[b]] = k[of], v[of]
    wide = run(wide_q, wide_k, wide_v, causal=causal, kv_lens=ints(*keys), layout="bshd")
    for b, (at, _, _) in enumerate(members(q, k, v, bounds)):
        start = 0 if causal == "top_left" else 64 - rows[b]
        near(got.out[at], wide.out[b, start : start + rows[b]], REORDERED[dtype], f"member {b}")


def test_M27_the_order_of_members_is_irrelevant(run: Runner):
    rows, keys = (17, 1, 0, 64, 5), (40, 64, 9, 65, 0)
    q, k, v, bounds = packed(rows, keys)
    for causal in (False, True):
        got = run(q, k, v, causal=causal, **bounds)
        order = (3, 1, 4, 0, 2)
        parts = members(q, k, v, bounds)
        turned = [torch.cat([x[parts[b][side]] for b in order]) for x, side in ((q, 0), (k, 1), (v, 1))]
        *_, turned_bounds = packed(tuple(rows[b] for b in order), tuple(keys[b] for b in order))
        other = run(*turned, causal=causal, **turned_bounds)
        want = torch.cat([got.out[parts[b][0]] for b in order])
        near(other.out, want, REORDERED[torch.float32])
        near(other.lse, torch.cat([got.lse[:, parts[b][0]] for b in order], 1), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_invariant_members(run: Runner, dtype: torch.dtype):
    """P16: with the flag a member's bits are those of the call on it alone."""
    rows, keys = (17, 1, 1, 64, 5), (40, 64, 64, 65, 130)
    q, k, v, bounds = packed(rows, keys, dtype=dtype)
    got = run(q, k, v, causal=True, batch_invariant=True, **bounds)
    for at, of, _ in members(q, k, v, bounds):
        alone = packed((at.stop - at.start,), (of.stop - of.start,))[3]
        one = run(q[at], k[of], v[of], causal=True, batch_invariant=True, **alone)
        same_bits(got.out[at], one.out, f"{at}")
        same_bits(got.lse[:, at].contiguous(), one.lse, f"{at}")


def test_max_seqlen_changes_nothing(run: Runner):
    for name in ("packed-causal", "packed-decode", "packed-decode-tail"):
        q, k, v, options = make(named(name))
        longest = {f"max_seqlen_{s}": int(options[f"cu_seqlens_{s}"].diff().max()) for s in "qk"}
        want = run(q, k, v, **options)
        for extra in (
            longest,
            {n: x + 100 for n, x in longest.items()},
            {"max_seqlen_q": longest["max_seqlen_q"]},
        ):
            got = run(q, k, v, **options, **extra)
            near(got.out, want.out, REORDERED[torch.float32])
            near(got.lse, want.lse, 1e-6)


def test_empty_members_and_tails(run: Runner):
    """Rows beyond the last bound, rows of members without keys: out 0, lse -inf, or the sink where there is
    a row of a member."""
    q, k, v, _ = packed((30,), (40,))
    sinks = torch.randn(4)
    for cu_q, cu_k in (
        ((0, 10, 20), (0, 0, 25)),
        ((0, 0, 5), (0, 40, 40)),
        ((0, 0), (0, 0)),
        ((0,), (0,)),
        ((0, 30), (0, 0)),
    ):
        bounds = {"cu_seqlens_q": ints(*cu_q), "cu_seqlens_k": ints(*cu_k)}
        for extra in ({}, {"causal": True}, {"sinks": sinks}):
            got = run.checked(q, k, v, label=f"{cu_q} {cu_k}", **bounds, **extra)
            assert (got.out[cu_q[-1] :] == 0).all() and (got.lse[:, cu_q[-1] :] == -math.inf).all()
    none = run(q[:0], k, v, cu_seqlens_q=ints(0, 0), cu_seqlens_k=ints(0, 40))
    assert none.out.shape == (0, 4, 32) and none.lse.shape == (4, 0)
    got = run(q, k[:0], v[:0], cu_seqlens_q=ints(0, 20), cu_seqlens_k=ints(0, 0), sinks=sinks)
    assert (got.out == 0).all() and (got.lse[:, 20:] == -math.inf).all()
    torch.testing.assert_close(got.lse[:, :20], sinks[:, None].expand(4, 20))


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    "name",
    (
        "packed",
        "packed-causal",
        "packed-decode-tail",
        "packed-lens",
        "packed-starts",
        "packed-dim-v",
        "packed-everything",
    ),
)
def test_guard_bands(run: Runner, name: str, dtype: str):
    workload = with_dtype(named(name), dtype)
    run.skip_unless(workload)
    check_guarded(run, *make(workload, seed=1))


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    "name",
    (
        "packed",
        "packed-causal",
        "packed-top-left",
        "packed-window",
        "packed-decode-tail",
        "packed-lens",
        "packed-starts",
        "packed-offset",
        "packed-everything",
    ),
)
def test_invisible_bits(run: Runner, name: str, dtype: str):
    """P5: rows and keys of nobody, keys beyond kv_lens or before kv_starts, keys their member's rows cannot
    see."""
    workload = with_dtype(named(name), dtype)
    run.skip_unless(workload)
    check_hidden(run, *make(workload, seed=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_member_sees_no_other(run: Runner, dtype: torch.dtype):
    """NaN in all of one member reaches all of its rows and no other row."""
    q, k, v, bounds = packed((17, 3, 64, 16), (40, 7, 130, 16), dtype=dtype)
    want = run(q, k, v, causal=True, **bounds)
    for at, of, _ in members(q, k, v, bounds):
        bad_q, bad_k, bad_v = q.clone(), k.clone(), v.clone()
        bad_q[at], bad_k[of], bad_v[of] = math.nan, math.nan, math.nan
        got = run(bad_q, bad_k, bad_v, causal=True, **bounds)
        others = torch.ones(len(q), dtype=torch.bool)
        others[at] = False
        same_bits(got.out[others], want.out[others], f"{at}")
        same_bits(got.lse[:, others], want.lse[:, others], f"{at}")
        assert got.out[at].isnan().all()


def test_any_strides(run: Runner):
    q, k, v, bounds = packed((17, 3, 64), (40, 7, 130))
    want = run(q.contiguous(), k.contiguous(), v.contiguous(), causal=True, **bounds)
    wide = torch.full((*q.shape[:2], 64), math.nan)
    wide[..., ::2] = q
    fused = torch.stack((k, v), 1)
    for views in (
        (q, k, v),
        (wide[..., ::2], k, v),
        (q.transpose(0, 2).contiguous().transpose(0, 2), fused[:, 0], fused[:, 1]),
    ):
        got = run(*views, causal=True, **bounds)
        same_bits(got.out, want.out)
        same_bits(got.lse, want.lse)
    one = run(q, k[:1].expand_as(k), v, causal=True, **bounds)
    same_bits(one.out, run(q, k[:1].expand_as(k).contiguous(), v, causal=True, **bounds).out)


def test_dropout_of_members(run: Runner):
    """The counter has the member's own indices: each member's mask is the oracle's."""
    from tests.references import varlen_reference

    for rows, keys in (((17, 5, 16, 16), (40, 9, 33, 33)), ((1, 1, 1), (20, 20, 7))):
        q, k, v, bounds = packed(rows, keys)
        got = run(q, k, v, causal=True, dropout_p=0.4, dropout_seed=5, **bounds)
        right = varlen_reference(q, k, v, *bounds.values(), causal=True, dropout_p=0.4, dropout_seed=5)
        assert relative_l2(got.out, right.out) < 1e-6


@pytest.mark.parametrize("dtype", (*NAMES, "float64"))
@pytest.mark.parametrize("name", PACKED)
def test_gradients(backend: str, name: str, dtype: str):
    """By the relative rule and the identities; 0 wherever no member is, and for keys no row has."""
    q, k, v, options = make(with_dtype(named(name), dtype), seed=7)
    got = checked(q, k, v, backend=backend, label=name, **options)
    for side, names in (("q", "q"), ("k", "kv")):
        end = int(options[f"cu_seqlens_{side}"][-1])
        assert all((got[n][end:] == 0).all() for n in names)
    for at, of, _ in members(q, k, v, options):
        if at.start == at.stop or of.start == of.stop:
            assert all((got[n][part] == 0).all() for n, part in (("q", at), ("k", of), ("v", of)))


def test_gradients_ignore_what_belongs_to_nobody(backend: str):
    """NaN in the rows and keys of nobody, and in their cotangents, reaches no gradient."""
    q, k, v, options = make(named("packed-lens"), seed=5)
    dout = torch.randn(*q.shape[:2], v.shape[2])
    want = gradients(q, k, v, dout, backend=backend, **options)
    rows, keys = (int(options[f"cu_seqlens_{s}"][-1]) for s in "qk")
    for x, end in ((q, rows), (dout, rows), (k, keys), (v, keys)):
        x[end:] = math.nan
    for _, of, (_, _, _, own) in members(q, k, v, options):
        k[of][int(own["kv_lens"]) :] = math.nan
        v[of][int(own["kv_lens"]) :] = math.nan
    got = gradients(q, k, v, dout, backend=backend, **options)
    for n in "qkv":
        same_bits(got[n], want[n], n)
