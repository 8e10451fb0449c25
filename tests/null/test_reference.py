"""The oracle is proved here: finite differences for its gradients, a loop over scalars for its values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from polyflash.mask import Mask
from polyflash.reference import attention_reference, dropout_keep, philox
from tests.references import paged_reference, varlen_reference

INF, NAN = math.inf, math.nan


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(batch=2, heads=(3, 1), seqlen=(4, 5), dims=(3, 2)) -> tuple[Tensor, Tensor, Tensor]:
    return (
        randn(batch, heads[0], seqlen[0], dims[0], seed=1),
        randn(batch, heads[1], seqlen[1], dims[0], seed=2),
        randn(batch, heads[1], seqlen[1], dims[1], seed=3),
    )


IDS = (torch.tensor([[0, 0, 1, 9], [2, 2, 2, 1]]), torch.tensor([[0, 1, 1, 1, 0], [1, 2, 2, 3, 3]]))
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "empty rows": {"causal": True, "q_offset": -2},
    "offset tensor": {"causal": True, "q_offset": torch.tensor([3, -1])},
    "window": {"window": (1, 1)},
    "window left": {"window": (2, None), "causal": True},
    "bool mask": {"mask": torch.tensor([1, 0, 1, 0, 1], dtype=torch.bool)},
    "hidden entry": {"mask": torch.tensor([True, False]).view(2, 1, 1, 1)},
    "lens": {"kv_lens": torch.tensor([3, 0]), "causal": True},
    "starts": {"kv_starts": torch.tensor([2, 4]), "kv_lens": torch.tensor([5, 4])},
    "Mask": {"mask": Mask.causal() & Mask.window(3, None)},
    "segments": {"mask": Mask.segments(*IDS)},
    "softcap": {"softcap": 0.7, "causal": True},
    "alibi": {
        "alibi_slopes": torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64),
        "kv_lens": torch.tensor([5, 2]),
    },
    "alibi per batch": {"alibi_slopes": torch.rand(2, 3, dtype=torch.float64)},
    "scale 0": {"scale": 0.0},
    "scale < 0": {"scale": -1.3, "softcap": 2.0},
    "dropout": {"dropout_p": 0.4, "dropout_seed": -5},
}


def loop(q: Tensor, k: Tensor, v: Tensor, o: dict) -> tuple[Tensor, Tensor]:
    """api.md's table for one pair after the other, in Python floats."""
    (batch, hq, sq, d), (_, hkv, sk, dv) = q.shape, v.shape
    out, lse = (
        torch.zeros(batch, hq, sq, dv, dtype=torch.float64),
        torch.zeros(batch, hq, sq, dtype=torch.float64),
    )
    mask = o.get("mask")
    rules = mask if isinstance(mask, Mask) else Mask()
    dense = mask.expand(batch, hq, sq, sk) if isinstance(mask, Tensor) else None
    bias = None if o.get("bias") is None else o["bias"].expand(batch, hq, sq, sk)
    slopes = None if o.get("alibi_slopes") is None else o["alibi_slopes"].expand(batch, hq)
    causal = o.get("causal") or rules.alignment
    for b in range(batch):
        live = int(o["kv_lens"][b]) if "kv_lens" in o else sk
        start = int(o["kv_starts"][b]) if "kv_starts" in o else 0
        off = 0 if causal == "top_left" else live - sq
        if "q_offset" in o:
            off = int(torch.as_tensor(o["q_offset"]).expand(batch)[b])
        for h in range(hq):
            for i in range(sq):
                scores = {}
                for j in range(start, live):
                    left, right = o.get("window") or (None, None)
                    left = rules.left if left is None else left
                    seen = not causal or j <= i + off
                    seen &= left is None or j >= i + off - left
                    seen &= right is None or j <= i + off + right
                    seen &= dense is None or bool(dense[b, h, i, j])
                    seen &= rules.q_ids is None or int(rules.q_ids[b, i]) == int(rules.k_ids[b, j])
                    if not seen:
                        continue
                    s = sum(
                        float(x) * float(y) for x, y in zip(q[b, h, i], k[b, h * hkv // hq, j], strict=True)
                    )
                    s *= d**-0.5 if o.get("scale") is None else o["scale"]
                    s = o["softcap"] * math.tanh(s / o["softcap"]) if o.get("softcap") else s
                    s += 0.0 if bias is None else float(bias[b, h, i, j])
                    s -= 0.0 if slopes is None else float(slopes[b, h]) * abs(i + off - j)
                    scores[j] = s
                total = sum(math.exp(s) for s in scores.values())
                total += math.exp(float(o["sinks"][h])) if o.get("sinks") is not None else 0.0
                lse[b, h, i] = math.log(total) if total else -INF
                for j, s in scores.items():
                    if math.exp(s):
                        weight = math.exp(s) / total
                        if o.get("dropout_p"):
                            weight *= kept_by_hand(o, b * hq + h, i, j) / (1 - o["dropout_p"])
                        out[b, h, i] += weight * v[b, h * hkv // hq, j]
    return out, lse


def kept_by_hand(o: dict, plane: int, i: int, j: int) -> bool:
    seed = o["dropout_seed"] & (2**64 - 1)
    words = philox_by_hand((j // 4, i, plane, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return words[j % 4] >= math.floor(o["dropout_p"] * 2**32)


def philox_by_hand(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    c, (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = ((b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF)
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_definition(name: str) -> None:
    q, k, v = qkv()
    options = CASES[name]
    out, lse = attention_reference(q, k, v, **options)
    want, want_lse = loop(q, k, v, options)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-13)


def test_bias_and_sinks_values() -> None:
    q, k, v = qkv(heads=(6, 2))
    options = {"bias": randn(1, 6, 1, 5, seed=4), "sinks": randn(6, seed=5), "kv_lens": torch.tensor([4, 0])}
    options["bias"][0, 2] = -INF
    out, lse = attention_reference(q, k, v, **options)
    want, want_lse = loop(q, k, v, options)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-13)
    assert torch.equal(lse[1], options["sinks"][:, None].expand(6, 4))


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_q_k_v(name: str) -> None:
    inputs = [x[: 2 if name != "plain" else 1].clone().requires_grad_() for x in qkv()]

    def call(*x: Tensor) -> Tensor:
        out, lse = attention_reference(*x, **CASES[name])
        return torch.cat([out, torch.where(lse == -INF, 0.0, lse).unsqueeze(-1)], -1)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (2, 3, 4, 5), (4, 5), (3, 1, 1), (2, 1, 4, 1)])
def test_gradients_of_bias_and_sinks(shape: tuple[int, ...]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    bias, sinks = randn(*shape, seed=6).requires_grad_(), randn(3, seed=7).requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        out, lse = attention_reference(q, k, v, bias=bias, sinks=sinks, causal=True, q_offset=-1, softcap=1.5)
        return torch.cat([out, lse.unsqueeze(-1)], -1)

    assert torch.autograd.gradcheck(call, (q, k, v, bias, sinks), fast_mode=True)


def test_empty_rows_are_zero_in_both_passes() -> None:
    inputs = [x.requires_grad_() for x in qkv(seqlen=(6, 3))]
    out, lse = attention_reference(*inputs, causal=True)
    assert torch.equal(out[:, :, :3], torch.zeros(2, 3, 3, 2, dtype=torch.float64))
    assert (lse[:, :, :3] == -INF).all() and torch.isfinite(lse[:, :, 3:]).all()
    (out.sum() + lse.sum()).backward()
    q, k, v = (x.grad for x in inputs)
    assert (q[:, :, :3] == 0).all() and all(torch.isfinite(x).all() for x in (q, k, v))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_invisible_operands_are_absent(value: float) -> None:
    """Keys 3 and 4 are seen by nobody; key 2 by rows 2 and 3 alone."""
    q, k, v = qkv()
    options = {"causal": True, "q_offset": 0, "kv_lens": torch.tensor([3, 3]), "softcap": 2.0}
    bias = randn(4, 5, seed=8)
    clean = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    dirty = [x.clone() for x in (q, k, v, bias)]
    dirty[1][:, :, 3:], dirty[2][:, :, 3:], dirty[3][:, 3:] = value, value, value
    dirty[3][0, 1:] = value
    dirty = [x.requires_grad_() for x in dirty]
    results = []
    for *x, b in (clean, dirty):
        out, lse = attention_reference(*x, bias=b, **options)
        (out.sin().sum() + lse.sum()).backward()
        results.append((out.detach(), lse.detach(), *(y.grad for y in (*x, b))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_visible_non_finite_values_reach_exactly_their_rows(value: float) -> None:
    q, k, v = qkv()
    v2 = v.clone()
    v2[0, 0, 2, 1] = value
    out, lse = attention_reference(q, k, v2, causal=True, q_offset=0)
    clean, clean_lse = attention_reference(q, k, v, causal=True, q_offset=0)
    want = clean.clone()
    want[0, :, 2:, 1] = value
    torch.testing.assert_close(out, want, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(lse, clean_lse)
    k2 = k.clone()
    k2[0, 0, 2] = NAN
    out, lse = attention_reference(q, k2, v, causal=True, q_offset=0)
    assert out[0, :, 2:].isnan().all() and lse[0, :, 2:].isnan().all()
    assert torch.equal(out[0, :, :2], clean[0, :, :2]) and torch.equal(out[1], clean[1])


def test_a_bad_row_spoils_no_gradient_of_keys_it_does_not_see() -> None:
    q, k, v = qkv()
    q[0, 0, 1] = NAN
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = attention_reference(*leaves, causal=True, q_offset=0)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert dq[0, 0, 1].isnan().all() and dq[0, 0, [0, 2, 3]].isfinite().all() and dq[0, 1:].isfinite().all()
    for x in (dk, dv):
        assert x[0, 0, :2].isnan().all() and x[0, 0, 2:].isfinite().all() and x[1].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_zero_sizes(shape: tuple[int, int, int, int]) -> None:
    batch, heads, sq, sk = shape
    q, k, v = (
        torch.ones(batch, heads, sq, 3),
        torch.ones(batch, heads, sk, 3),
        torch.ones(batch, heads, sk, 2),
    )
    out, lse = attention_reference(q, k, v, causal=True)
    assert out.shape == (batch, heads, sq, 2) and lse.shape == (batch, heads, sq)
    assert (out == 0).all() or sk
    assert (lse == -INF).all() or sk


def test_layout() -> None:
    q, k, v = qkv()
    out, lse = attention_reference(q, k, v)
    other, other_lse = attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), layout="bshd")
    assert torch.equal(out.transpose(1, 2), other) and torch.equal(lse, other_lse)


def test_philox_known_answers() -> None:
    """Random123's kat_vectors."""
    for word, key, want in (
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, 0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        got = philox([np.array([word])] * 4, key, key)
        assert tuple(int(x[0]) for x in got) == want
        assert philox_by_hand((word,) * 4, (key, key)) == want
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    got = philox([np.array([c]) for c in counter], 0xA4093822, 0x299F31D0)
    assert tuple(int(x[0]) for x in got) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_a_word_equal_to_the_threshold_is_kept() -> None:
    assert dropout_keep((1, 1, 1, 1), 0x6627E8D5 / 2.0**32, 0)
    assert not dropout_keep((1, 1, 1, 1), 0x6627E8D6 / 2.0**32, 0)


def test_dropout_keeps_the_right_share_and_the_denominator() -> None:
    keep = dropout_keep((2, 3, 64, 65), 0.3, seed=1 << 40)
    assert abs(keep.mean() - 0.7) < 0.01
    q, k, v = qkv(seqlen=(40, 50))
    _, lse = attention_reference(q, k, v)
    out, dropped = attention_reference(q, k, v.new_ones(v.shape), dropout_p=0.3, dropout_seed=7)
    assert torch.equal(lse, dropped)
    assert abs(float(out.mean()) - 1.0) < 0.02


def test_varlen_is_a_loop_with_a_tail() -> None:
    cu_q, cu_k = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 2, 4, 4])
    q, k, v = randn(7, 4, 3), randn(4, 2, 3, seed=1), randn(4, 2, 2, seed=2)
    out, lse = varlen_reference(q, k, v, cu_q, cu_k, causal=True, dropout_p=0.2, dropout_seed=3)
    first, first_lse = attention_reference(
        q[None, :3], k[None, :2], v[None, :2], causal=True, dropout_p=0.2, dropout_seed=3, layout="bshd"
    )
    assert torch.equal(out[:3], first[0]) and torch.equal(lse[:, :3], first_lse[0])
    assert (
        (out[3:] == 0).all() and (lse[:, 3:] == -INF).all() and out.shape == (7, 4, 2) and lse.shape == (4, 7)
    )


def test_varlen_members_draw_their_own_dropout() -> None:
    q, k, v = (randn(3, 2, 2, seed=s).repeat(2, 1, 1) for s in (0, 1, 2))
    cu = torch.tensor([0, 3, 6])
    out, _ = varlen_reference(q, k, v, cu, cu, dropout_p=0.5, dropout_seed=3)
    batched, _ = attention_reference(
        *(x.view(2, 3, 2, 2) for x in (q, k, v)), dropout_p=0.5, dropout_seed=3, layout="bshd"
    )
    assert torch.equal(out, batched.flatten(0, 1)) and not torch.equal(out[:3], out[3:])


def test_paged_gathers_and_hides_what_is_not_in_the_pool() -> None:
    k, v = randn(2, 6, 1, 3, seed=1), randn(2, 6, 1, 2, seed=2)
    pool_k, pool_v = (
        torch.full((5, 2, 1, 3), NAN, dtype=torch.float64),
        torch.full((5, 2, 1, 2), NAN, dtype=torch.float64),
    )
    table = torch.tensor([[4, 0, 2], [1, -1, 7]])
    for b, n, page in ((0, 0, 4), (0, 1, 0), (0, 2, 2), (1, 0, 1)):
        pool_k[page], pool_v[page] = k[b, 2 * n : 2 * n + 2], v[b, 2 * n : 2 * n + 2]
    q, lens = randn(2, 3, 3), torch.tensor([5, 6])
    out, lse = paged_reference(q, pool_k, pool_v, table, lens)
    hide = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]], dtype=torch.bool)[:, None, None]
    want, want_lse = attention_reference(q[:, None], k, v, mask=hide, layout="bshd")
    torch.testing.assert_close(out, want[:, 0])
    torch.testing.assert_close(lse, want_lse[..., 0].T)


def test_varlen_lengths_are_those_of_its_members() -> None:
    """kv_lens, kv_starts and q_offset of a member, against slices of it."""
    q, k, v = (torch.randn(n, 2, 4, dtype=torch.float64) for n in (7, 12, 12))
    cu_q, cu_k = torch.tensor([0, 3, 7]), torch.tensor([0, 5, 12])
    out, lse = varlen_reference(
        q, k, v, cu_q, cu_k, causal=True, kv_lens=torch.tensor([4, 6]), kv_starts=torch.tensor([1, 0])
    )
    first = attention_reference(
        *(x[None] for x in (q[:3], k[:4], v[:4])), causal=True, mask=torch.arange(4) >= 1, layout="bshd"
    )
    second = attention_reference(*(x[None] for x in (q[3:], k[5:11], v[5:11])), causal=True, layout="bshd")
    torch.testing.assert_close(out, torch.cat((first.out[0], second.out[0])))
    torch.testing.assert_close(lse, torch.cat((first.lse[0], second.lse[0]), 1))
    moved = varlen_reference(q, k, v, cu_q, cu_k, causal=True, q_offset=torch.tensor([0, 2])).out
    torch.testing.assert_close(
        moved[3:], attention_reference(*(x[None] for x in (q[3:], k[5:], v[5:])), causal=True, q_offset=2,
        layout="bshd").out[0],
    )  # fmt: skip


def test_interval_lists_pair_by_pair() -> None:
    """Against a mask written by three loops."""
    bounds = torch.tensor([[[[0, 2], [4, 4], [5, 9]], [[3, 3], [1, 4], [0, 0]], [[0, 0], [0, 0], [2, 3]]]])
    starts, ends = torch.stack((bounds, bounds.flip(2)), 1).int().unbind(-1)
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (5, 6, 6))
    written = torch.zeros(1, 2, 5, 6, dtype=torch.bool)
    for h in range(2):
        for i in range(5):
            for start, end in zip(starts[0, h, i // 2].tolist(), ends[0, h, i // 2].tolist(), strict=True):
                for j in range(start, min(end, 6)):
                    written[0, h, i, j] = True
    got = attention_reference(q, k, v, mask=Mask.intervals(starts, ends, rows=2))
    want = attention_reference(q, k, v, mask=written)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_paged_counts_from_a_requests_first_key_and_ignores_what_lies_beyond() -> None:
    """Starts and offsets are those of the gathered keys; garbage beyond the live length hides nothing."""
    torch.manual_seed(0)
    pool = torch.randn(7, 3, 2, 8)
    table = torch.tensor([[4, 6, -9], [2, 99, 99]], dtype=torch.int32)
    lens, starts = torch.tensor([5, 3]), torch.tensor([2, 0])
    q = torch.randn(2, 4, 8)
    for offset in (1, torch.tensor([3, 0])):
        got = paged_reference(
            q, pool, pool, table, lens, kv_starts=starts, q_offset=offset, causal=True, window=(2, None)
        )
        for b, pages in enumerate(([4, 6], [2])):
            keys = pool[pages].flatten(0, 1)[None, : lens[b]].transpose(1, 2)
            at = int(offset[b]) if isinstance(offset, torch.Tensor) else offset
            want = attention_reference(
                q[b][None, :, None], keys, keys, kv_starts=starts[b : b + 1], q_offset=at, causal=True,
                window=(2, None),
            )  # fmt: skip
            assert torch.equal(got.out[b], want.out[0, :, 0]) and torch.equal(
                got.lse[:, b], want.lse[0, :, 0]
            )
    empty = paged_reference(q, pool[:0], pool[:0], table, torch.tensor([5, 0]))
    assert not empty.out.any() and (empty.lse == -torch.inf).all()


def test_bounds_of_rows_are_a_mask() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8)
    bounds = torch.tensor([[0, 9], [2, 3], [4, 4], [-5, 1], [8, 20]], dtype=torch.int32)
    mask = torch.zeros(5, 9, dtype=torch.bool)
    for i, (lo, hi) in enumerate(bounds.tolist()):
        mask[i, max(lo, 0) : hi] = True
    got, want = attention_reference(q, k, k, row_bounds=bounds), attention_reference(q, k, k, mask=mask)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    both = attention_reference(q, k, k, row_bounds=bounds, mask=torch.arange(9) % 2 == 0)
    want = attention_reference(q, k, k, mask=mask & (torch.arange(9) % 2 == 0))
    assert torch.equal(both.out, want.out)
