"""The torch rows, forward and backward, at their own door: small tiles, every feature, against the oracle."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyflash.backends.torch import backward, forward
from polyflash.backends.torch.capabilities import CAPABILITIES
from polyflash.backends.torch.configs import Config, candidates, choose
from polyflash.backends.torch.philox import kept, philox
from polyflash.errors import SpecError
from polyflash.mask import Mask
from polyflash.operands import features_of
from polyflash.plan import Launch, select
from polyflash.reference import attention_reference, dropout_keep
from polyflash.spec import Arguments, AttentionSpec, Feature, Phase
from polyflash.target import KNOWN, Target, parse
from tests.tolerance import check, compare, eager, expect, same_bits

INF, NAN = math.inf, math.nan
SMALL = Config(8, 16, max_scores=1)  # many tiles, one batch entry at a time
MERGED = Config(16, 32)  # all batch entries at once
CPU = Target("cpu:generic")


@pytest.fixture(autouse=True)
def one_thread():
    """Tiles here are tiny: waking a second thread costs more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(
    batch: int = 2,
    heads: tuple[int, int] = (6, 2),
    seqlen: tuple[int, int] = (37, 53),
    dims: tuple[int, int] = (8, 5),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        randn(batch, heads[0], seqlen[0], dims[0], seed=1, dtype=dtype),
        randn(batch, heads[1], seqlen[1], dims[0], seed=2, dtype=dtype),
        randn(batch, heads[1], seqlen[1], dims[1], seed=3, dtype=dtype),
    )


def arguments(options: dict[str, Any]) -> Arguments:
    """What api.py makes of the public arguments."""
    o = dict(options)
    mask = o.pop("mask", None)
    fields: dict[str, Any] = {"need_lse": True}
    if isinstance(mask, Mask):
        o.setdefault("causal", mask.alignment or False)
        o.setdefault("window", mask.window_sides)
        fields |= {"q_segments": mask.q_ids, "k_segments": mask.k_ids}
    else:
        fields["mask"] = mask
    causal, offset = o.pop("causal", False), o.pop("q_offset", None)
    fields["causal"] = bool(causal)
    fields["window_left"], fields["window_right"] = o.pop("window", None) or (None, None)
    if isinstance(offset, Tensor):
        fields["q_offset"] = offset
    else:
        fields["offset"] = 0 if offset is None and causal == "top_left" else offset
    seed = o.pop("dropout_seed", None)
    fields["dropout_seed"] = None if seed is None else torch.tensor(seed)
    return Arguments(**fields, **o)


def launch(config: Config, phase: Phase = Phase.FORWARD, rung: str = "heuristic") -> Launch:
    spec = AttentionSpec(phase, "float32", "cpu", 1, 1, 1, 1, 1, 1, 1, frozenset())
    return Launch(CAPABILITIES[phase is Phase.BACKWARD], config, rung, CPU, spec)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], config: Config = SMALL
) -> tuple[Tensor, Tensor]:
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = q.new_full((*q.shape[:3], v.shape[3]), NAN)
    lse = q.new_full(q.shape[:3], NAN, dtype=kind)
    return forward.run(launch(config), q, k, v, out, lse, arguments(options))


def run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    dout: Tensor,
    dlse: Tensor | None = None,
    config: Config = SMALL,
    needs: tuple[bool, bool, bool, bool, bool] | None = None,
) -> tuple[Tensor | None, ...]:
    out, lse = run_forward(q, k, v, options, config)
    needs = needs or (True, True, True, options.get("bias") is not None, options.get("sinks") is not None)
    return backward.run(
        launch(config, Phase.BACKWARD), dout, dlse, q, k, v, out, lse, arguments(options), needs
    )


def reference_gradients(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    leaves = {"q": q, "k": k, "v": v, **{n: options[n] for n in ("bias", "sinks") if n in options}}
    leaves = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    rest = {n: x for n, x in options.items() if n not in leaves}
    out, lse = attention_reference(
        leaves["q"], leaves["k"], leaves["v"], **rest, **{n: leaves[n] for n in leaves if n in options}
    )
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == -INF, 0.0, lse * dlse.double()).sum()
    return torch.autograd.grad(loss, list(leaves.values()))


def masked_bias(*shape: int) -> Tensor:
    bias = randn(*shape, seed=4)
    bias[..., 7] = -INF
    return bias


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


IDS = (torch.arange(37).repeat(2, 1) // 5, torch.arange(53).repeat(2, 1) // 6)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "empty rows": {"causal": True, "q_offset": -20},
    "offset tensor": {"causal": True, "q_offset": ints(30, -3)},
    "window": {"window": (3, 5)},
    "window 0": {"window": (0, 0)},
    "window left": {"window": (9, None), "causal": True},
    "window right": {"window": (None, 2)},
    "bool mask": {"mask": randn(2, 6, 37, 53, seed=5) > 0.3},
    "mask of keys": {"mask": randn(53, seed=5) > 0, "causal": True},
    "mask of rows": {"mask": randn(6, 37, 1, seed=5) > 0},
    "kv_lens": {"kv_lens": ints(17, 0)},
    "kv_lens causal": {"kv_lens": ints(41, 20), "causal": True, "window": (25, None)},
    "kv_starts": {"kv_lens": ints(50, 20), "kv_starts": ints(33, 20)},
    "segments": {"mask": Mask.segments(*IDS) & Mask.causal()},
    "bias full": {"bias": masked_bias(2, 6, 37, 53)},
    "bias keys": {"bias": masked_bias(1, 6, 1, 53), "causal": True},
    "bias rows": {"bias": randn(2, 1, 37, 1, seed=4)},
    "bias 2d": {"bias": masked_bias(37, 53)},
    "softcap": {"softcap": 0.8, "causal": True},
    "alibi": {"alibi_slopes": randn(6, seed=7).abs(), "causal": True},
    "alibi per batch": {"alibi_slopes": randn(2, 6, seed=7).abs(), "q_offset": ints(4, 9)},
    "sinks": {"sinks": randn(6, seed=6), "causal": True, "q_offset": -4},
    "sinks -inf": {"sinks": torch.tensor([0, -INF, 1, 5, -INF, 2]).double(), "causal": True, "q_offset": -4},
    "scale 0": {"scale": 0.0, "causal": True},
    "scale < 0": {"scale": -1.7, "softcap": 3.0},
    "dropout": {"dropout_p": 0.4, "dropout_seed": -(1 << 50) + 12345},
    "everything": {
        "causal": True,
        "window": (40, None),
        "mask": randn(2, 1, 37, 53, seed=5) > -1,
        "bias": masked_bias(6, 37, 53),
        "alibi_slopes": randn(6, seed=7).abs(),
        "softcap": 5.0,
        "sinks": randn(6, seed=6),
        "scale": 0.3,
        "kv_lens": ints(51, 30),
        "kv_starts": ints(3, 0),
        "dropout_p": 0.2,
        "dropout_seed": 7,
    },
}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("config", [SMALL, MERGED], ids=["small", "merged"])
@pytest.mark.parametrize("name", CASES)
def test_float64_is_the_oracle(name: str, config: Config, invariant: bool) -> None:
    """Every formula, forward and backward with both cotangents, at float64 accuracy."""
    q, k, v = qkv()
    options = CASES[name]
    own = options | ({"batch_invariant": True} if invariant else {})
    out, lse = run_forward(q, k, v, own, config)
    want, want_lse = attention_reference(q, k, v, **options)
    torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)
    dout, dlse = randn(*out.shape, seed=8), randn(*lse.shape, seed=9)
    got = run_backward(q, k, v, own, dout, dlse, config)
    wanted = reference_gradients(q, k, v, options, dout, dlse)
    for g, w in zip([x for x in got if x is not None], wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-11)


RULED = ("plain", "causal", "kv_lens causal", "window", "bias keys", "softcap", "alibi", "sinks", "bool mask")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RULED)
def test_relative_rule(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dims=(64, 40), dtype=dtype)
    options = CASES[name]
    out, lse = run_forward(q, k, v, options, MERGED)
    check(out, lse, expect(q, k, v, **options), label=name, options=options)
    dout = randn(*out.shape, seed=8, dtype=dtype)
    got = run_backward(q, k, v, options, dout, config=MERGED)
    right = reference_gradients(q, k, v, options, dout, None)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = torch.autograd.grad(eager(*leaves, **options)[0], leaves, dout)
    for label, g, w, t in zip(("dq", "dk", "dv"), got, right, theirs, strict=False):
        assert g is not None and g.dtype is dtype
        compare(g, w, t.double(), dtype, ratio=4, label=f"{name} {label}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_broadcast_operands_keep_shape_and_dtype(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=torch.float32)
    options = {"bias": randn(6, 1, 53, dtype=dtype), "sinks": randn(6, seed=6, dtype=dtype)}
    *_, dbias, dsinks = run_backward(q, k, v, options, torch.ones(2, 6, 37, 5))
    assert dbias is not None and dsinks is not None
    assert (dbias.shape, dbias.dtype, dsinks.shape, dsinks.dtype) == ((6, 1, 53), dtype, (6,), dtype)
    *_, want, want_sinks = reference_gradients(q, k, v, options, torch.ones(2, 6, 37, 5), None)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(dbias.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dsinks.double(), want_sinks, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("one", range(5))
def test_only_what_is_asked_for(one: int) -> None:
    q, k, v = qkv()
    options = {"bias": randn(6, 1, 53), "sinks": randn(6, seed=6), "causal": True}
    dout = randn(2, 6, 37, 5)
    needs = tuple(i == one for i in range(5))
    some, every = run_backward(q, k, v, options, dout, needs=needs), run_backward(q, k, v, options, dout)
    assert [x is not None for x in some] == list(needs)
    same_bits(some[one], every[one])


@pytest.mark.parametrize("layout", ["bshd", "stride 2", "expanded", "offset"])
def test_any_strides(layout: str) -> None:
    def strided(x: Tensor) -> Tensor:
        if layout == "bshd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "stride 2":
            return torch.stack((x, x * NAN), -1).flatten(-2)[..., ::2]
        if layout == "expanded":
            return x[:, :, :1, :1].expand(x.shape)
        return torch.cat((x.new_zeros(3), x.flatten()))[3:].view(x.shape)

    q, k, v = (strided(x) for x in qkv(dtype=torch.float32))
    dout = strided(randn(2, 6, 37, 5, dtype=torch.float32))
    options = {"causal": True}
    plain = [x.contiguous() for x in (q, k, v)]
    for a, b in zip(run_forward(q, k, v, options), run_forward(*plain, options), strict=True):
        same_bits(a, b)
    got = run_backward(q, k, v, options, dout)
    for a, b in zip(got[:3], run_backward(*plain, options, dout.contiguous())[:3], strict=True):
        same_bits(a.contiguous(), b)


def test_strides_of_mask_and_bias_change_no_bit() -> None:
    q, k, v = qkv(dtype=torch.float32)
    dout = randn(2, 6, 37, 5, dtype=torch.float32)
    plain = {"mask": randn(2, 6, 37, 53, seed=5) > 0.3, "bias": randn(37, 53, dtype=torch.float32)}
    turned = {n: x.mT.contiguous().mT for n, x in plain.items()}
    for config in (SMALL, MERGED):
        for a, b in zip(
            run_forward(q, k, v, turned, config), run_forward(q, k, v, plain, config), strict=True
        ):
            same_bits(a, b)
        got, want = (run_backward(q, k, v, o, dout, config=config)[:4] for o in (turned, plain))
        for a, b in zip(got, want, strict=True):
            same_bits(a, b)


def test_strided_out_is_filled_in_place() -> None:
    q, k, v = qkv(dtype=torch.float32)
    out = torch.full((2, 37, 6, 5), NAN).transpose(1, 2)
    lse = torch.full((2, 6, 37), NAN)
    result, _ = forward.run(launch(SMALL), q, k, v, out, lse, arguments({"causal": True}))
    assert result is out
    same_bits(out.contiguous(), run_forward(q, k, v, {"causal": True})[0])


def test_empty_rows_and_unseen_keys_are_exactly_zero() -> None:
    q, k, v = qkv(seqlen=(40, 12), dtype=torch.float32)
    options = {"causal": True, "kv_lens": torch.tensor([12, 0], dtype=torch.int32)}
    out, lse = run_forward(q, k, v, options)
    assert (out[0, :, :28] == 0).all() and (out[1] == 0).all() and (lse[1] == -INF).all()
    dout = randn(2, 6, 40, 5, dtype=torch.float32)
    dout[:, :, :28] = NAN
    dq, dk, dv, *_ = run_backward(
        q, k, v, options, dout, torch.full((2, 6, 40), NAN).masked_fill(lse > -INF, 0)
    )
    assert (dq[0, :, :28] == 0).all() and (dq[1] == 0).all() and (dk[1] == 0).all() and (dv[1] == 0).all()
    assert dq[0, :, 28:].isfinite().all() and dk[0].abs().min() > 0


@pytest.mark.parametrize("value", [NAN, INF, 65504.0])
@pytest.mark.parametrize(
    "name", ["causal", "kv_lens causal", "window", "mask of keys", "bias 2d", "segments", "softcap"]
)
def test_invisible_bits_change_nothing(name: str, value: float) -> None:
    q, k, v = qkv(dtype=torch.float32)
    k2, v2 = k.clone(), v.clone()
    options = dict(CASES[name])
    if name in ("causal", "softcap"):
        options["q_offset"] = -5
    seen = attention_reference(q, k, torch.eye(53).expand(2, 2, 53, 53), **options).out > 0
    hidden = ~seen.unflatten(1, (2, 3)).any(2).any(2)
    assert hidden.any()
    k2[hidden], v2[hidden] = value, value
    dout = randn(2, 6, 37, 5, dtype=torch.float32)
    for config in (SMALL, MERGED):
        for a, b in zip(
            run_forward(q, k2, v2, options, config), run_forward(q, k, v, options, config), strict=True
        ):
            same_bits(a, b)
        got, want = (run_backward(q, *x, options, dout, config=config) for x in ((k2, v2), (k, v)))
        for a, b in zip(got, want, strict=True):
            assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("operand", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_visible_non_finite_reaches_exactly_the_rows_that_see_it(operand: str, value: float) -> None:
    """Causal, no offset: row i sees keys 0..i. One bad element at row or key 20 of entry 0, head 0."""
    q, k, v = qkv(seqlen=(37, 37), dtype=torch.float32)
    dout = randn(2, 6, 37, 5, dtype=torch.float32)
    named = {"q": q, "k": k, "v": v, "dout": dout}
    clean = run_forward(q, k, v, {"causal": True}), run_backward(q, k, v, {"causal": True}, dout)
    named[operand] = named[operand].clone()
    named[operand][0, 0, 20, 3] = value
    q, k, v, dout = named.values()
    out, lse = run_forward(q, k, v, {"causal": True})
    want, want_lse = attention_reference(q, k, v, causal=True)
    for ours, right in ((out, want), (lse, want_lse)):
        for test in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(test(ours), test(right)), operand
    dq, dk, dv, *_ = run_backward(q, k, v, {"causal": True}, dout)
    touched_rows = {"q": slice(20, 21), "dout": slice(20, 21)}.get(operand, slice(20, 37))
    touched_keys = slice(0, 21) if operand in ("q", "dout") else slice(0, 37)
    if operand in ("v", "dout") or math.isnan(value):
        assert not dq[0, 0, touched_rows].isfinite().all(-1).any()
        assert not dk[0, 0, touched_keys].isfinite().all(-1).any()
        if operand in ("q", "dout"):
            assert not dv[0, 0, touched_keys].isfinite().all(-1).any()
    for mine, other, touched in (
        (dq, clean[1][0], touched_rows),
        (dk, clean[1][1], touched_keys),
        (dv, clean[1][2], touched_keys),
    ):
        spared = torch.ones(mine.shape[2], dtype=torch.bool)
        spared[touched] = False
        torch.testing.assert_close(mine[0, 0, spared], other[0, 0, spared], rtol=1e-4, atol=1e-5)
        assert torch.equal(mine[1], other[1])


def test_single_visible_key_has_no_score_gradient() -> None:
    q, k, v = qkv(seqlen=(5, 1), dtype=torch.float32)
    dq, dk, dv, *_ = run_backward(q, k, v, {}, randn(2, 6, 5, 5, dtype=torch.float32))
    assert dq.abs().max() < 2e-6 and dk.abs().max() < 2e-5 and dv.abs().max() > 0.1


@pytest.mark.parametrize("causal", [False, True])
def test_batch_invariance_is_bitwise(causal: bool) -> None:
    """Alone or in a batch, whole or in chunks of queries: the same bits, gradients too."""
    q, k, v = qkv(batch=3, seqlen=(61, 61), dims=(16, 16), dtype=torch.float32)
    options = {"batch_invariant": True, "causal": causal}
    config = choose(spec_for(q, k, v, arguments(options)), CPU)
    assert config == choose(spec_for(q[:1, :, :1], k[:1], v[:1], arguments(options)), CPU)
    out, lse = run_forward(q, k, v, options, config)
    alone = run_forward(q[1:2], k[1:2], v[1:2], options, config)
    same_bits(out[1:2], alone[0])
    same_bits(lse[1:2], alone[1])
    dout = randn(3, 6, 61, 16, dtype=torch.float32)
    for every, one in zip(
        run_backward(q, k, v, options, dout, config=config)[:3],
        run_backward(q[1:2], k[1:2], v[1:2], options, dout[1:2], config=config)[:3],
        strict=True,
    ):
        same_bits(every[1:2], one)
    if causal:
        for lo, hi in ((0, 13), (13, 14), (14, 61)):
            part = run_forward(q[:, :, lo:hi], k[:, :, :hi], v[:, :, :hi], options, config)
            same_bits(part[0], out[:, :, lo:hi])
            same_bits(part[1], lse[:, :, lo:hi])


def test_batch_invariant_tiles_are_full_aligned_and_of_one_entry() -> None:
    """What the equality above rests on, as BLAS libraries differ in how bits depend on a product's shape."""
    q, k, v = qkv(seqlen=(21, 53))
    for offset in (None, 0, 5, -3):
        args = arguments({"batch_invariant": True, "q_offset": offset})
        cut = list(forward.parts(q, k, v, args, MERGED))
        assert [(p.first, p.entries) for p in cut] == [(0, 1), (1, 1)]
        tiles = list(forward.row_tiles(cut[0], MERGED))
        assert all((i0 + (32 if offset is None else offset)) % 16 == 0 and rows == 16 for i0, rows in tiles)
        assert tiles[0][0] <= 0 and tiles[-1][0] + 16 >= 21 and len(tiles) <= 3
        assert all(
            keys == 32 for i0, rows in tiles for _, keys in forward.key_tiles(cut[0], i0, rows, MERGED)
        )


def test_repeats_are_bitwise_equal() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    dout = randn(2, 6, 37, 5, dtype=torch.bfloat16)
    first = run_backward(q, k, v, CASES["everything"], dout)
    for _ in range(5):
        for a, b in zip(first, run_backward(q, k, v, CASES["everything"], dout), strict=True):
            same_bits(a, b)


def test_skips_tiles_that_no_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles visited = tiles with a visible pair, by brute force."""
    visited = []
    score_tile = forward.score_tile

    def spy(part: Any, b_q: Tensor, b_k: Tensor, i0: int, rows: int, j0: int, keys: int) -> Any:
        visited.append((part.first, i0, j0))
        return score_tile(part, b_q, b_k, i0, rows, j0, keys)

    monkeypatch.setattr(forward, "score_tile", spy)
    q, k, v = qkv()
    for options in (
        CASES["causal"],
        CASES["window"],
        CASES["kv_lens causal"],
        CASES["kv_starts"],
        CASES["offset tensor"],
    ):
        visited.clear()
        run_forward(q, k, v, options)
        seen = attention_reference(q, k, torch.eye(53).expand(2, 2, 53, 53), **options).out[:, 0] > 0
        wanted = {
            (b, i0, j0)
            for b in range(2)
            for i0 in range(0, 37, 8)
            for j0 in range(0, 53, 16)
            if seen[b, i0 : i0 + 8, j0 : j0 + 16].any()
        }
        assert len(visited) == len(set(visited)) and set(visited) == wanted


def test_lengths_on_a_device_keep_bounds_wide_and_mask_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices run, on the CPU: per-entry values stay tensors, nothing is read back."""
    q, k, v = qkv(dtype=torch.float32)
    names = ("kv_lens", "kv_lens causal", "kv_starts", "offset tensor", "everything")
    want = {n: run_forward(q, k, v, CASES[n], MERGED) for n in names}

    def on_device(x: Tensor | None, first: int, entries: int, default: Any) -> Any:
        return default if x is None else x[first : first + entries].long().view(-1, 1, 1, 1, 1)

    monkeypatch.setattr(forward, "_value", on_device)
    for n in names:
        out, lse = run_forward(q, k, v, CASES[n], MERGED)
        torch.testing.assert_close(out, want[n][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, want[n][1], rtol=1e-6, atol=1e-6)


def test_memory_does_not_grow_with_the_square() -> None:
    from torch.profiler import ProfilerActivity, profile

    peaks = []
    for n in (1024, 4096):
        q, k, v = qkv(1, (1, 1), (n, n), (16, 16), torch.float32)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
            run_forward(q, k, v, {"causal": True}, Config(128, 512))
        level = peak = 0
        for e in sorted((e for e in p.events() if e.name == "[memory]"), key=lambda e: e.time_range.start):
            level += e.cpu_memory_usage
            peak = max(peak, level)
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 3 * 1024 * 4 * 20, peaks  # out, lse and a little; the scores would be 60 MB


def spec_for(q: Tensor, k: Tensor, v: Tensor, args: Arguments, device: str = "cpu") -> AttentionSpec:
    features = features_of(
        args, num_q_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[3], head_dim_v=v.shape[3]
    )
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    window = (args.window_left, args.window_right)
    return AttentionSpec(
        Phase.FORWARD,
        str(q.dtype)[6:],
        device,
        *sizes,
        features,
        args.causal,
        window,
        args.offset,
        args.scale,
    )


def plain_launch(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Launch:
    return select(spec_for(q, k, v, args), CPU, CAPABILITIES, backend="torch", config="")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_handover_is_taken_and_is_right(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(heads=(6, 2), seqlen=(65, 130), dims=(64, 64), dtype=dtype)
    calls = []
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: calls.append(1) or sdpa(*a, **o))
    chosen = plain_launch(q, k, v, Arguments())
    assert chosen.config.sdpa and "SDPA" in chosen.config.notes(chosen.spec)[0]
    out, _ = forward.run(chosen, q, k, v, q.new_full(q.shape, NAN), torch.empty(0), Arguments())
    assert calls
    check(out, None, expect(q, k, v), label="handover")


@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("seqlen", [5, 70])
def test_handover_refuses_scores_that_are_not_finite(operand: str, value: float, seqlen: int) -> None:
    """torch 2.13 on a CPU returns numbers for some NaN rows; the plan may have been made for other values."""
    q, k, v = qkv(heads=(2, 2), seqlen=(seqlen, seqlen), dims=(32, 32), dtype=torch.bfloat16)
    chosen = plain_launch(q, k, v, Arguments())
    {"q": q, "k": k, "v": v}[operand][0, 1, seqlen // 2, 3] = value
    out, _ = forward.run(chosen, q, k, v, torch.empty_like(q), torch.empty(0), Arguments())
    if abs(value) == INF or math.isnan(value):
        right = attention_reference(q, k, v).out
        assert torch.equal(out.isnan(), right.isnan()) and torch.equal(out.isinf(), right.isinf())


def test_handover_needs_a_plain_call() -> None:
    q, k, v = qkv(heads=(2, 2), dims=(8, 8), dtype=torch.float32)
    pinned = launch(Config(16, 16, sdpa=True), rung="explicit")
    for name, options in CASES.items():
        args = arguments(options)._replace(need_lse=False)
        assert plain_launch(q, k, v, args).config.sdpa is (
            name in ("plain", "causal")
        )  # lengths are not planned for
        if name != "plain":
            with pytest.raises(SpecError, match="dense"):
                forward.run(pinned, q, k, v, torch.empty_like(q), torch.empty(0), args)
    assert not plain_launch(q, k, v, Arguments(need_lse=True)).config.sdpa


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_and_decode_calls_are_handed_over(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: calls.append(1) or sdpa(*a, **o))
    for keys, taken in ((70, True), (90, rows == 1)):
        q, k, v = qkv(heads=(6, 2), seqlen=(rows, keys), dims=(32, 32), dtype=dtype)
        calls.clear()
        chosen, args = plain_launch(q, k, v, Arguments(causal=True)), Arguments(causal=True)
        out, _ = forward.run(chosen, q, k, v, q.new_full(q.shape, NAN), torch.empty(0), args)
        assert bool(calls) is taken
        check(out, None, expect(q, k, v, causal=True), label="handover")


@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("value", [NAN, INF, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_handed_over_row_keeps_its_bits_whatever_it_does_not_see(
    operand: str, value: float, dtype: torch.dtype
) -> None:
    """A causal row sees no key behind it, and no other row."""
    q, k, v = qkv(heads=(4, 2), seqlen=(70, 70), dims=(32, 32), dtype=dtype)
    chosen, args = plain_launch(q, k, v, Arguments(causal=True)), Arguments(causal=True)
    clean, _ = forward.run(chosen, q, k, v, torch.empty_like(q), torch.empty(0), args)
    clean = clean.clone()
    {"q": q, "k": k, "v": v}[operand][0, 1, 40, 3] = value
    out, _ = forward.run(chosen, q, k, v, torch.empty_like(q), torch.empty(0), args)
    seen = torch.zeros(q.shape[:3], dtype=torch.bool)
    if operand == "q":
        seen[0, 1, 40] = True
    else:
        seen[0, 2:4, 40:] = True
    assert torch.equal(out[~seen], clean[~seen])
    if value != 3e38:
        right = attention_reference(q, k, v, causal=True).out
        assert torch.equal(out.isnan(), right.isnan()) and torch.equal(out.isinf(), right.isinf())


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_a_reused_launch_does_not_hand_over_other_scales(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A route does not depend on the value of scale."""
    q, k, v = qkv(heads=(2, 2), dims=(8, 8), dtype=torch.float32)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    pinned, args = launch(Config(16, 16, sdpa=True)), Arguments(scale=scale)
    out, _ = forward.run(pinned, q, k, v, torch.empty_like(q), torch.empty(0), args)
    want = attention_reference(q, k, v, scale=scale).out
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_rows_accept_everything_everywhere() -> None:
    for row in CAPABILITIES:
        none = set() if row.phase is Phase.FORWARD else {Feature.PAGED, Feature.ROW_BOUNDS}
        none |= {Feature.DROPOUT, Feature.DROPOUT_START} if row.phase is Phase.STATISTICS else set()
        none |= set() if row.phase is Phase.BACKWARD else {Feature.WIDE_GRADIENTS}
        none |= {Feature.CODES}  # they get codes decoded: quant/calls.py
        assert row.features == frozenset(Feature) - none and row.dtypes == {
            "float64",
            "float32",
            "float16",
            "bfloat16",
        }
        for target in (*KNOWN, Target("xpu:generic"), Target("mps:generic")):
            features = row.features if target.kind == "cpu" else row.features - row.host_features
            for seqlen in (1, 7, 300, 1 << 20):
                spec = AttentionSpec(
                    row.phase, "float64", target.kind, 3, 33, 11, seqlen, 1 << 22, 7, 9, features
                )
                assert row.accepts(spec, target, by_name=False)
                assert choose(spec, target) in candidates(spec, target)


def test_sdpa_only_on_devices_where_it_was_checked() -> None:
    spec = AttentionSpec(Phase.FORWARD, "bfloat16", "", 1, 8, 8, 512, 512, 64, 64, frozenset())
    for name, wanted in (
        ("cpu:avx2", True),
        ("cuda:sm90", False),
        ("hip:gfx942", False),
        ("metal:m3", False),
    ):
        assert choose(spec, parse(name)).sdpa is wanted
    assert not choose(replace(spec, needs_grad=True), CPU).sdpa


@pytest.mark.parametrize("sizes", [(3, 16, 1), (128, 0, 1), (128, 4096, 1), (128, 128, 0)])
def test_config_proves_itself(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(SpecError, match="got"):
        Config(*sizes)


def test_philox_known_answers() -> None:
    zero, ones = torch.tensor([0]), torch.tensor([0xFFFFFFFF])
    assert [int(x) for x in philox((zero,) * 4, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(x) for x in philox((ones,) * 4, -1)] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_a_word_equal_to_the_threshold_is_kept() -> None:
    word, plane = 0x6627E8D5, torch.zeros(1, 1, 1, dtype=torch.int64)
    for above, keep in ((0, True), (1, False)):
        p = (word + above) / 2.0**32
        assert bool(kept(plane, 0, 1, 0, 1, p=p, seed=0)) is keep


@pytest.mark.parametrize("seed", [0, 5, 1 << 62, -3])
def test_dropout_bits_are_the_oracle_s(seed: int) -> None:
    want = torch.from_numpy(dropout_keep((2, 3, 9, 30), 0.3, seed))
    planes = torch.arange(6).view(2, 3, 1)
    for i0, rows, j0, keys in ((0, 9, 0, 30), (2, 3, 8, 7), (8, 1, 28, 2)):
        got = kept(planes, i0, rows, j0, keys, p=0.3, seed=seed).squeeze(2)
        assert torch.equal(got, want[:, :, i0 : i0 + rows, j0 : j0 + keys])


def test_unchecked_lists_hide_what_is_no_interval():
    """On a device contents are not read first: an end before its start, bounds outside, overlaps."""
    from polyflash.backends.torch.intervals import listed

    lists = torch.tensor([[[9, 2], [-5, 1], [4, 7], [6, 8], [30, 99], [3, 3]]], dtype=torch.int32)
    seen = listed(lists, 0, 2, 0, 12, 2, 2)
    assert [j for j in range(12) if seen[0, j]] == [0, 4, 5, 6, 7] and torch.equal(seen[0], seen[1])
    assert torch.equal(listed(lists, 0, 2, 4, 4, 2, 2)[0], torch.ones(4, dtype=torch.bool))


def test_unchecked_bounds_stay_within_the_tensors():
    """Bounds that fall or leave the tensors make members shorter, never slices of another place."""
    from polyflash.backends.torch.packed import runs

    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ((-3, 4, 2, 99), (1, 99, -5, 7)))
    found = list(runs(Arguments(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), 10, 8))
    assert [(r.first, r.members, r.i0, r.rows, r.j0, r.keys) for r in found] == [
        (0, 1, 0, 4, 1, 7),
        (2, 1, 4, 6, 8, 0),
    ]


def test_equal_neighbours_are_one_batch():
    """Views of the packed tensors, and the per-member operands of those members alone."""
    from polyflash.backends.torch.packed import runs

    bounds = torch.tensor([0, 2, 4, 6, 9], dtype=torch.int32)
    lens = torch.arange(4, dtype=torch.int32)
    args = Arguments(cu_seqlens_q=bounds, cu_seqlens_k=bounds, kv_lens=lens, alibi_slopes=torch.rand(4, 2))
    first, last = runs(args, 9, 9)
    assert (first.members, first.rows, last.first, last.rows) == (3, 2, 3, 3)
    x = torch.arange(9.0).view(1, 1, 9, 1).expand(1, 2, 9, 4)
    assert first.rows_of(x)[:, 0, :, 0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert first.rows_of(x).data_ptr() == x.data_ptr()
    assert last.arguments(args).kv_lens.tolist() == [3] and first.arguments(args).alibi_slopes.shape == (3, 2)
    assert first.arguments(args).cu_seqlens_q is None
