"""Codes on the device: every template between guard bands, GpuCodes, and calls that are cut up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import SpecError, webgpu
from polyflash.backends.webgpu.codes import held_on_device, without_tables
from polyflash.backends.webgpu.configs import ROW, TILE, Variant
from polyflash.backends.webgpu.device import Device
from polyflash.backends.webgpu.forward import Plan, launch_forward, prepare, sizes_of
from polyflash.quant import NAMED, QuantizedTensor, Scheme, dequantize, quantize
from polyflash.quant.calls import opened
from polyflash.reference import attention_reference
from polyflash.spec import Arguments
from polyflash.webgpu import GpuCodes, GpuTensor
from tests.backends.webgpu.call import TEMPLATES, off, qkv
from tests.backends.webgpu.test_device import limit
from tests.backends.webgpu.test_kernels import Guarded

SCHEMES = {
    "int8": NAMED["int8"],
    "int4": (NAMED["int4"][0], Scheme(dtype="int4", channels=6, symmetric=False)),  # blocks across words
    "nf4": NAMED["nf4"],
    "fp8-block": (Scheme(dtype="fp8_e4m3", granularity="block", tokens=7, channels=9), Scheme(tokens=None)),
}
PLANS = {
    **{name: Plan(TEMPLATES[name]) for name in ("tile", "tile of subgroups", "row", "4 lanes, 4 rows")},
    "splits": Plan(Variant(TILE, 4, 4, 1, 1), True, 3),
    "splits of rows": Plan(Variant(ROW, 32, rn4=2), True, 3),
}


MULTIPLIED = {
    "mean": (Scheme(compute="int8", smoothing="mean"), Scheme(compute="int8", granularity="channel")),
    "groups": (Scheme(compute="int8", granularity="block", tokens=7), Scheme(compute="int8")),
}


def launched(on: Device, q: Tensor, coded: list[QuantizedTensor], plan: Plan) -> tuple[GpuTensor, ...]:
    """out and lse of a causal call over codes."""
    call = opened(q, *coded, Arguments(causal=True, backend="webgpu"))
    assert call.args.codes
    held = GpuTensor.of(q), *held_on_device(call.k, call.v, call.args)
    args = without_tables(call.args)._replace(need_lse=True)
    return launch_forward(*held, prepare(on, sizes_of(*held), q.dtype, args, plan))  # type: ignore[return-value]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("plan", PLANS)
def test_reads_its_codes_and_no_other(on: Device, name: str, plan: str, monkeypatch: pytest.MonkeyPatch):
    """Rows of codes and of tables end within words: nothing behind them is read, nor in padding counted."""
    if PLANS[plan].variant.subgroups and not on.limits.subgroup:
        pytest.skip("no subgroups here")
    q, k, v = qkv(3 if "splits" in plan else 41, dims=(62, 46))
    coded = [quantize(x, s) for x, s in zip((k, v), SCHEMES[name], strict=True)]
    guards = Guarded(on, monkeypatch)
    out, lse = launched(on, q, coded, PLANS[plan])
    exact = (q, *(x.values(torch.float64).float() for x in coded))
    assert off(out.torch(), exact, causal=True) < 4e-6 and bool(lse.torch().isfinite().all())
    padding = on.read(out.block).view("f4").reshape(-1, 48)[:, 46:]
    assert (padding == 0).all()
    guards.check()


@pytest.mark.parametrize("name", MULTIPLIED)
@pytest.mark.parametrize("plan", ("tile", "row", "4 lanes, 4 rows"))
def test_products_of_integers(on: Device, name: str, plan: str, monkeypatch: pytest.MonkeyPatch):
    """Nothing is lost but what q loses in 8 bits, and by rows in registers alone. One NaN spoils its row."""
    variant = TEMPLATES[plan]
    if variant.lanes > max(1, on.limits.subgroup):
        pytest.skip(f"subgroups of {on.limits.subgroup} lanes")
    q, k, v = qkv(41, dims=(14, 10) if variant.lanes == 1 else (16, 16))
    k[..., ::11] += 3
    coded = [quantize(x, s) for x, s in zip((k, v), MULTIPLIED[name], strict=True)]
    steps = (q * (127 / q.abs().amax(-1, keepdim=True))).round() / 32
    exact = [x.values(torch.float64).float() for x in coded]
    guards = Guarded(on, monkeypatch)
    out, lse = (x.torch() for x in launched(on, steps, coded, Plan(variant)))
    assert off(out, (steps, *exact), causal=True) < 4e-6
    assert (lse - attention_reference(steps, *exact, causal=True).lse).abs().max() < 4e-6  # the mean is in it
    rounded = off(launched(on, q, coded, Plan(variant))[0].torch(), (q, *exact), causal=True)
    assert rounded < 4e-6 if plan == "tile" else 1e-4 < rounded < 5e-2
    guards.check()
    steps[1, 2, 7, 5] = torch.nan
    spoiled, lse = (x.torch() for x in launched(on, steps, coded, Plan(variant)))
    assert lse.isnan().nonzero().tolist() == [[1, 2, 7]] and bool(spoiled[1, 2, 7].isnan().all())
    spoiled[1, 2, 7] = out[1, 2, 7]
    assert torch.equal(spoiled, out)


def test_codes_stay_on_the_device(on: Device):
    q, k, v = qkv(1, 300, dims=(64, 64))
    for rows in (q, qkv(30, 300, dims=(64, 64))[0]):
        for name in ("int8-smooth", "int4"):
            k_codes, v_codes = (quantize(x, s) for x, s in zip((k, v), NAMED[name], strict=True))
            held = GpuCodes.of(k_codes), GpuCodes.of(v_codes)
            want = polyflash.attention(rows, k_codes, v_codes, causal=True, backend="webgpu")
            assert torch.equal(webgpu.attention(GpuTensor.of(rows), *held, causal=True).torch(), want)
            waits = on.waits
            mixed, lse = webgpu.attention(GpuTensor.of(rows), held[0], GpuTensor.of(v), return_lse=True)
            assert on.waits == waits
            values = rows.double(), k_codes.values(torch.float64), v.double()
            assert off(mixed.torch(), values) < 5e-6 and lse.shape == rows.shape[:3]
    assert held[0].shape == k.shape and held[0].nbytes < k.numel() and "GpuCodes(int4/" in repr(held[0])


def test_refusals(on: Device):
    q, k, v = qkv(dims=(64, 64))
    turned = quantize(k, Scheme(rotation="hadamard"))
    with pytest.raises(SpecError, match="rotation"):
        GpuCodes.of(turned)
    with pytest.raises(SpecError, match="a QuantizedTensor on the CPU"):
        GpuCodes.of(k)
    held = GpuCodes.of(quantize(k, Scheme())), GpuCodes.of(quantize(v[:, :1], Scheme()))
    with pytest.raises(SpecError, match="v heads"):
        webgpu.attention(GpuTensor.of(q), *held)
    with pytest.raises(SpecError, match="a GpuTensor or GpuCodes"):
        webgpu.attention(GpuTensor.of(q), k, v)


def test_codes_above_the_binding_limit(on: Device, monkeypatch: pytest.MonkeyPatch):
    q, k, v = qkv(41, dims=(64, 64))
    coded = [quantize(x, s) for x, s in zip((k, v), NAMED["int4"], strict=True)]
    whole, before = polyflash.attention(q, *coded, causal=True, backend="webgpu"), on.launches
    limit(on, monkeypatch, binding_bytes=41 * 4 * 64 * 2)
    parts = polyflash.attention(q, *coded, causal=True, backend="webgpu")
    assert on.launches - before >= 4 and torch.equal(parts, whole)


def test_groups_count_from_the_first_of_all_members(on: Device):
    q, k, v = (x[0].transpose(0, 1) for x in qkv(75, 290, dims=(64, 64)))
    members = {"cu_seqlens_q": torch.tensor((0, 20, 75)), "cu_seqlens_k": torch.tensor((0, 90, 290))}
    members = {name: x.int() for name, x in members.items()}
    coded = [quantize(x, s, layout="thd") for x, s in zip((k, v), NAMED["int8-channel"], strict=True)]
    got = polyflash.attention_varlen(q, *coded, **members, causal=True, backend="webgpu")
    want = polyflash.attention_varlen(q, *map(dequantize, coded), **members, causal=True, backend="torch")
    assert torch.allclose(got, want, atol=1e-5)
