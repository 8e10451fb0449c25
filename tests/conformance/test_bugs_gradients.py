"""Real defects of other implementations: gradients and autograd. Named by id."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import polyflash
from polyflash import Mask
from tests import device
from tests.conformance.gradients import checked, cotangents, gradients, hold, keeps_bits, right_gradients
from tests.conformance.rows import DTYPES, NAMES, ints, qkv
from tests.tolerance import near, relative_l2, same_bits, same_of_other_strides


def test_B_grad_06_bias_lengths(backend: str):
    """A bias whose last dimension is no multiple of 8: its gradient sums to 0 along keys."""
    for keys in range(1, 18):
        q, k, v = qkv(1, 1, 5, keys, 8)
        options = {"bias": torch.randn(1, 1, 5, keys)}
        dout = torch.randn_like(q)
        got = gradients(q, k, v, dout, backend=backend, **options)
        hold(got, q, k, v, dout, None, options, f"{keys} keys")
        magnitude = float(got["bias"].abs().sum() + (dout * got["out"]).abs().sum())
        assert float(got["bias"].double().sum(-1).abs().max()) <= 1e-6 * magnitude


def test_B_msk_05_mostly_empty_rows(backend: str):
    """M ≫ N causal, D = 32, ×3: dQ finite, 0 on empty rows."""
    for rows, keys in ((76, 1), (34, 1), (146, 2)):
        q, k, v = (3 * x for x in qkv(1, 2, rows, keys, 32, dtype=torch.float16))
        dout = torch.ones_like(q)
        got = gradients(q, k, v, dout, backend=backend, causal=True)
        assert all(torch.isfinite(got[n]).all() for n in "qkv")
        assert (got["q"][:, :, : rows - keys] == 0).all()
        hold(got, q, k, v, dout, None, {"causal": True}, f"{rows}x{keys}")


def test_B_msk_07_large_fp16(backend: str):
    q, k, v = (3 * x for x in qkv(1, 1, 512, 512, 128, dtype=torch.float16))
    dout = torch.randn_like(q)
    got = gradients(q, k, v, dout, backend=backend, causal=True)
    hold(got, q, k, v, dout, None, {"causal": True}, "×3")


def test_B_dim_05_B_dim_07_dim_v(backend: str):
    for heads in ((2, 2), (6, 2)):
        q, k, v = qkv(1, heads, 40, 60, 128, 96)
        dout = torch.randn(1, heads[0], 40, 96)
        got = gradients(q, k, v, dout, backend=backend, causal=True)
        hold(got, q, k, v, dout, None, {"causal": True}, f"{heads}")


def test_B_grad_12_short_lengths_odd_dim(backend: str):
    for n in (15, 85, 200):
        q, k, v = qkv(1, 2, n, n, 100)
        dout = torch.randn_like(q)
        for causal in (False, True):
            got = gradients(q, k, v, dout, backend=backend, causal=causal)
            hold(got, q, k, v, dout, None, {"causal": causal}, f"{n}")


def test_B_grad_13_fp32_is_ieee(backend: str):
    q, k, v = qkv(1, 2, 128, 128, 64)
    dout = torch.randn_like(q)
    got = gradients(q, k, v, dout, backend=backend)
    right = right_gradients(q, k, v, dout, None, {})
    assert all(relative_l2(got[n], right[n]) <= 3e-6 for n in "qkv")


def test_B_str_14_strided_dout(backend: str):
    """dO of any strides: every second column, transposed, and the expanded scalar of sum().backward()."""
    q, k, v = qkv(2, (4, 2), 20, 30, 16)
    wide = torch.randn(2, 4, 20, 32)
    cases = (
        wide[..., ::2],
        torch.randn(2, 20, 4, 16).transpose(1, 2),
        torch.tensor(0.3).expand(2, 4, 20, 16),
    )
    for dout in cases:
        got, want = (gradients(q, k, v, d, backend=backend, causal=True) for d in (dout, dout.contiguous()))
        for name in "qkv":
            same_bits(got[name], want[name])


def test_B_str_08_gradients_do_not_depend_on_layout(backend: str):
    q, k, v = qkv(2, (4, 2), 20, 30, 16)
    dout = torch.randn_like(q)
    want = gradients(q, k, v, dout, backend=backend, causal=True)
    views = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    out = polyflash.attention(*views, causal=True, layout="bshd", backend=backend)
    grads = torch.autograd.grad(out, views, dout.transpose(1, 2))
    for name, grad in zip("qkv", grads, strict=True):
        same_bits(grad.transpose(1, 2), want[name], name)


def test_B_grad_01_double_backward():
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 4, 4, 8))
    out = polyflash.attention(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.autograd.grad(dq.sum(), q)


def test_B_grad_02_forward_mode():
    from torch.autograd import forward_ad

    q, k, v = qkv(1, 1, 4, 4, 8)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        polyflash.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_B_grad_07_autocast(backend: str):
    """Under autocast: compute and result in the autocast dtype, gradients in the inputs' own."""
    q, k, v = qkv(1, 2, 20, 30, 16)
    q.requires_grad_()
    k, v = k.bfloat16().requires_grad_(), v.bfloat16().requires_grad_()
    with torch.autocast(device.DEVICE.type, dtype=torch.bfloat16):
        out = polyflash.attention(q, k, v, backend=backend)
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype is torch.float32 and k.grad.dtype is torch.bfloat16


def test_B_grad_08_inference_tensors():
    with torch.inference_mode():
        q, k, v = qkv(1, 1, 4, 4, 8)
        polyflash.attention(q, k, v)
    parameter = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(RuntimeError):
        polyflash.attention(parameter, k, v).sum().backward()


def test_B_grad_09_copy_and_pickle_masks():
    mask = Mask.causal() & Mask.window(3, None) & Mask.lengths(ints(4, 5))
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other.alignment == "bottom_right" and other.window_sides == (3, None)
        assert torch.equal(other.kv_lens, mask.kv_lens)


def test_B_grad_04_every_signature():
    """github.com/feifeibear/long-context-attention/pull/149: as many gradients as arguments, whichever are
    given; finite differences through the public functions, with empty rows, D_v ≠ D, groups of 3."""
    q, k, v = (x.double().requires_grad_() for x in qkv(2, (3, 1), 4, 3, 2, 3))
    bias = torch.randn(1, 3, 1, 3, dtype=torch.float64).requires_grad_()
    sinks = torch.randn(3, dtype=torch.float64).requires_grad_()
    slopes = torch.tensor((0.5, 0.25, 1.0), dtype=torch.float64)
    signatures: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        ({"causal": True}, ()),
        ({"window": (1, 1), "softcap": 1.5}, ()),
        ({"kv_lens": ints(2, 0), "alibi_slopes": slopes}, ()),
        ({"causal": True, "kv_starts": ints(1, 0)}, ("bias",)),
        ({"q_offset": -1, "causal": True}, ("sinks",)),
        ({"mask": torch.tensor((True, False, True)), "dropout_p": 0.4, "dropout_seed": 9}, ("bias", "sinks")),
    )
    for options, names in signatures:
        extra = [{"bias": bias, "sinks": sinks}[n] for n in names]

        def call(q, k, v, *extra, options=options, names=names):
            given = {**options, **dict(zip(names, extra, strict=True))}
            out, lse = polyflash.attention(q, k, v, return_lse=True, **given)
            return out, torch.where(torch.isfinite(lse), lse, 0)

        assert torch.autograd.gradcheck(call, (q, k, v, *extra), fast_mode=True), options


def test_B_grad_03_one_small_input(backend: str):
    """github.com/AMD-AGI/Primus-Turbo/pull/458: only the sinks, or only a bias of one value per head."""
    q, k, v = qkv(2, (4, 2), 20, 30, 16)
    for name, x in (("sinks", torch.randn(4)), ("bias", torch.randn(4, 1, 1)), ("bias", torch.randn(()))):
        dout, dlse = cotangents(q, v)
        options = {name: x, "causal": True}
        got = gradients(q, k, v, dout, dlse, backend=backend, needs=(name,), **options)
        assert set(got) == {"out", "lse", name}
        hold(got, q, k, v, dout, dlse, options, name)


@pytest.mark.parametrize("dtype", NAMES)
def test_B_grad_05_broadcast_bias(backend: str, dtype: str):
    """github.com/HKUSTDial/flash-sparse-attention/issues/194: (1, H, 1, N), summed, not the last block's."""
    q, k, v = qkv(3, (4, 2), 150, 300, 16, dtype=getattr(torch, dtype))
    bias = torch.randn(1, 4, 1, 300).to(q.dtype)
    for lengths in ({}, {"kv_lens": ints(300, 299, 17)}):  # all entries at once, and each apart
        checked(q, k, v, backend=backend, bias=bias, causal=True, label=f"{list(lengths)}", **lengths)


def test_B_msk_06_one_by_one(backend: str):
    """github.com/Dao-AILab/flash-attention/issues/334: M = N = 1, D = 16, fp16 ×3, dO = 1."""
    q, k, v = (3 * x for x in qkv(1, 2, 1, 1, 16, dtype=torch.float16))
    got = gradients(q, k, v, torch.ones_like(q), backend=backend)
    assert torch.equal(got["v"], torch.ones_like(v))
    assert all(float(got[n].abs().max()) <= 1e-2 for n in "qk")  # half a unit of a delta of 16 × 3 × 3


def test_B_grad_11_residue_of_a_constant_softmax(backend: str):
    """github.com/fla-org/flash-linear-attention/commit/d9078580: N = 1 in float32; 2e-3 was found."""
    q, k, v = qkv(2, 4, 64, 1, 64)
    got = gradients(q, k, v, torch.randn_like(q), backend=backend)
    assert all(float(got[n].abs().max()) <= 2e-5 for n in "qk")


def test_B_msk_04_tiles_that_see_nothing(backend: str):
    """github.com/pytorch/pytorch/issues/127055: N = 640, whole (row block × key block) pairs hidden."""
    q, k, v = qkv(1, 2, 640, 640, 16)
    at = torch.arange(640) // 64
    checked(q, k, v, backend=backend, mask=(at[:, None] + at) % 3 == 0, label="checkered")
    checked(q, k, v, backend=backend, window=(20, 20), label="band")


def test_B_msk_03_masked_nan(backend: str):
    """github.com/pytorch/pytorch/issues/101967: NaN in K and V at masked positions."""
    q, k, v = qkv(2, (4, 2), 40, 70, 16)
    mask = torch.rand(2, 1, 1, 70, generator=torch.Generator().manual_seed(0)) < 0.6
    dout, dlse = cotangents(q, v)
    want = gradients(q, k, v, dout, dlse, backend=backend, mask=mask)
    hidden = ~mask[:, 0, 0, :, None][:, None]
    bad = (torch.where(hidden, float("nan"), x) for x in (k, v))
    got = gradients(q, *bad, dout, dlse, backend=backend, mask=mask)
    for name in "qkv":
        keeps_bits(backend, got[name], want[name], name)


def test_B_cau_03_B_cau_04_more_rows_than_keys(backend: str):
    """github.com/Dao-AILab/flash-attention/issues/282: causal M > N; the first M - N rows are 0."""
    for rows, keys in ((40, 1), (129, 65), (300, 17)):
        for dtype in DTYPES:
            q, k, v = qkv(1, (4, 2), rows, keys, 32, dtype=dtype)
            got = checked(q, k, v, backend=backend, causal=True, label=f"{rows}x{keys}")
            assert (got["q"][:, :, : rows - keys] == 0).all()


@pytest.mark.parametrize("causal", (False, True))
def test_B_cau_05_causal_flag_of_the_backward_pass(backend: str, causal: bool):
    """github.com/triton-lang/triton/issues/4541: a backward pass that took every call for causal."""
    q, k, v = qkv(1, 2, 130, 130, 32)
    got = checked(q, k, v, backend=backend, causal=causal)
    dout, _ = cotangents(q, v)
    dout[:, :, -1] = 0
    late = gradients(q, k, v, dout, backend=backend, causal=causal)["k"][:, :, -1]
    assert got["k"][:, :, -1].abs().min() > 0 and bool((late == 0).all()) is causal


@pytest.mark.parametrize("group", (1, 2, 3, 5, 6, 7, 8, 12))
def test_B_gqa_02_B_gqa_05_gradients_of_groups(backend: str, group: int):
    """github.com/LMCache/LMCache/pull/3092, mlc-ai/mlc-llm/pull/2543, M25: dK, dV are sums over a group."""
    q, k, v = qkv(2, (2 * group, 2), 33, 70, 16)
    dout, dlse = cotangents(q, v)
    got = gradients(q, k, v, dout, dlse, backend=backend, causal=True)
    wide = [x.repeat_interleave(group, 1) for x in (k, v)]
    one = gradients(q, *wide, dout, dlse, backend=backend, causal=True)
    near(got["q"], one["q"], 1e-6)
    for name in "kv":
        near(got[name], one[name].unflatten(1, (2, group)).sum(2), 2e-6, name)


def test_B_big_12_keys_stored_by_position(backend: str):
    """github.com/pytorch/pytorch/issues/190857: K, V as [N, B, D] seen as [B, 1, N, D], rows far apart."""
    n, stride = 5, 3 << 20
    storage = torch.zeros((n - 1) * stride + 16)
    k = torch.as_strided(storage, (1, 1, n, 8), (0, 0, stride, 1))
    v = torch.as_strided(storage, (1, 1, n, 8), (0, 0, stride, 1), 8)
    q, k0, v0 = qkv(1, 1, 3, n, 8)
    k.copy_(k0)
    v.copy_(v0)
    dout, dlse = cotangents(q, v)
    want = gradients(q, k0, v0, dout, dlse, backend=backend)
    got = gradients(q, k, v, dout, dlse, backend=backend, as_given=True)
    for name in "qkv":
        same_of_other_strides(backend, got[name], want[name], name)


def test_B_q_18_real_activations(backend: str):
    """github.com/NVIDIA/TransformerEngine/issues/3216: a backward pass wrong on real activations alone."""
    safetensors = pytest.importorskip("safetensors.torch")
    slices = safetensors.load_file(Path(__file__).parent.parent / "data" / "minilm_qkv_slice.safetensors")
    q, k, v = (slices[f"layer3.{name}"] for name in "qkv")
    for dtype in DTYPES:
        for options in ({}, {"causal": True}):
            checked(*(x.to(dtype) for x in (q, k, v)), backend=backend, label=f"{dtype}", **options)


def test_B_cmp_04_backward_around_block_edges(backend: str):
    """github.com/pytorch/pytorch/issues/153799: NaN at N = 1025 with a block mask, and N = 64."""
    for n, size in ((1025, 128), (64, 128), (127, 128), (129, 128)):
        q, k, v = qkv(1, 1, n, n, 16)
        grid = torch.ones(-(-n // size), -(-n // size), dtype=torch.bool).tril()
        checked(q, k, v, backend=backend, mask=Mask.blocks(grid, rows=size, keys=size), label=f"{n}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_B_grad_14_dropout(backend: str, dtype: torch.dtype):
    """The backward mask is the forward mask: V = identity shows the forward one, dV the backward one."""
    n = 24
    q, k, _ = qkv(2, 2, n, n, 16, dtype=dtype)
    v = torch.eye(n, dtype=dtype).expand(2, 2, n, n)
    dropping: dict[str, Any] = {"dropout_p": 0.4, "dropout_seed": torch.tensor(1234, dtype=torch.int64)}
    got = gradients(q, k, v, v.contiguous(), backend=backend, **dropping)
    weights, dv = got["out"], got["v"].transpose(2, 3)
    assert torch.equal(dv != 0, weights != 0)
    near(dv, weights, 4 * torch.finfo(dtype).eps)
    assert abs(float((weights == 0).float().mean()) - 0.4) < 0.05
    again = gradients(q, k, v, v.contiguous(), backend=backend, dropout_p=0.4, dropout_seed=1234)
    same_bits(again["out"], weights)
    same_bits(again["v"], got["v"])
    assert not torch.equal(weights[0] != 0, weights[1] != 0)
    assert not torch.equal(weights[0, 0] != 0, weights[0, 1] != 0)


def test_B_grad_14_the_generator_moves_once():
    """A seed is drawn once per call, in the forward pass; the backward pass leaves the generator alone."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 20, 30, 16))
    torch.manual_seed(3)
    out = polyflash.attention(q, k, v, dropout_p=0.5)
    state = torch.get_rng_state()
    first = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first, second, strict=True):
        same_bits(a, b)
    torch.manual_seed(3)
    same_bits(polyflash.attention(q, k, v, dropout_p=0.5), out)
    assert not torch.equal(polyflash.attention(q, k, v, dropout_p=0.5), out)
