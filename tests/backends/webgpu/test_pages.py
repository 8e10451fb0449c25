"""Keys in pages on the device: every template between guard bands, pools that grow, calls that are cut up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyflash
from polyflash import SpecError, webgpu
from polyflash.backends.webgpu.configs import ROW, TILE, Variant
from polyflash.backends.webgpu.device import Device
from polyflash.backends.webgpu.forward import Plan
from polyflash.quant import NAMED, Scheme, quantize
from polyflash.spec import Arguments
from polyflash.webgpu import GpuCodes, GpuTensor
from polyflash.workloads import in_pages
from tests.backends.webgpu.call import TEMPLATES, attend, off, qkv
from tests.backends.webgpu.test_device import limit
from tests.backends.webgpu.test_kernels import Guarded

PLANS = {
    **{name: Plan(TEMPLATES[name]) for name in ("tile", "row", "4 lanes, 4 rows")},
    "splits": Plan(Variant(TILE, 4, 4, 1, 1), True, 3),
    "splits of rows": Plan(Variant(ROW, 32, rn4=2), True, 3),
}
LENS = (131, 77)


def pools(k: torch.Tensor, v: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Pools (pages, heads, size, ·) in a shuffled order, NaN where no request has a key, and their table."""
    k, v, table = in_pages(k, v, LENS, size, torch.Generator().manual_seed(size))
    return k.transpose(1, 2), v.transpose(1, 2), table


@pytest.mark.parametrize("size", (1, 16, 60))
@pytest.mark.parametrize("plan", PLANS)
def test_reads_its_pages_and_no_other(on: Device, plan: str, size: int, monkeypatch: pytest.MonkeyPatch):
    if PLANS[plan].variant.lanes > max(1, on.limits.subgroup):
        pytest.skip(f"subgroups of {on.limits.subgroup} lanes")
    q, k, v = qkv(3 if "splits" in plan else 41, dims=(16, 32))
    *pair, table = pools(k, v, size)
    lens = torch.tensor(LENS, dtype=torch.int32)
    table = table.where(torch.arange(table.shape[1]) * size < lens[:, None], 2**31 - 1)
    guards = Guarded(on, monkeypatch)
    args = Arguments(causal=True, window_left=50, page_table=table, kv_lens=lens)
    out, lse = attend(on, PLANS[plan].variant, (q, *pair), args, PLANS[plan])
    guards.check()
    assert off(out, (q, k, v), causal=True, window=(50, None), kv_lens=lens) < 2e-6
    assert bool(lse.isfinite().all())


def test_a_growing_pool(on: Device):
    """Tokens written to pages between calls of a batch, of which each sees its own."""
    q, k, v = qkv(1, 40, dims=(24, 20))
    held = GpuTensor.of(q), *(GpuTensor.of(torch.zeros(6, 2, 16, x.shape[3])) for x in (k, v))
    table, results = torch.tensor(((4, 1, 5), (0, 2, 3)), dtype=torch.int32), []
    with webgpu.batch():
        for n in range(0, 40, 8):
            for pool, rows in zip(held[1:], (k, v), strict=True):
                for b in range(2):
                    pool.write_rows(n % 16, rows[b : b + 1, :, n : n + 8], page=int(table[b, n // 16]))
            lens = torch.full((2,), n + 8, dtype=torch.int32)
            results.append(webgpu.attention(*held, page_table=table, kv_lens=lens))
    for i, result in enumerate(results, 1):
        want = polyflash.attention(q, k[:, :, : 8 * i], v[:, :, : 8 * i])
        assert torch.allclose(result.torch(), want, atol=1e-5)
    for page in (-1, 6):
        with pytest.raises(SpecError, match=f"page {page}"):
            held[1].write_rows(0, k[:1, :, :8], page=page)


def test_equal_tables_are_bound_once(on: Device, monkeypatch: pytest.MonkeyPatch):
    """By what they hold: layers of a step share a table, the next step changes it where it stands."""
    q, k, v = qkv(1, 131, dims=(24, 20))
    *pair, table = pools(k, v, 16)
    held = [GpuTensor.of(x) for x in (q, *pair)]
    own = {"page_table": table, "kv_lens": torch.tensor(LENS, dtype=torch.int32)}
    monkeypatch.setattr(on, "calls", {})
    first = webgpu.attention(*held, **own).torch()
    kept = len(on.calls)
    assert torch.equal(webgpu.attention(*held, **{n: x.clone() for n, x in own.items()}).torch(), first)
    assert len(on.calls) == kept
    own["kv_lens"] -= 1
    want = polyflash.attention(q, k, v, **{"kv_lens": own["kv_lens"]})
    assert torch.allclose(webgpu.attention(*held, **own).torch(), want, atol=1e-5)
    table[1, 4] = len(pair[0])
    with pytest.raises(SpecError, match=r"page_table.*request 1 in column 4"):
        webgpu.attention(*held, **own)


def test_pools_above_the_binding_limit(on: Device, monkeypatch: pytest.MonkeyPatch):
    """Calls of CPU tensors take the pages of their requests along, and no others."""
    q, k, v = qkv(1, 131, dims=(64, 64))
    *pair, table = (x.transpose(1, 2) if x.ndim == 4 else x for x in pools(k, v, 16))
    lens = torch.tensor(LENS, dtype=torch.int32)
    own: dict[str, Any] = {"page_table": table, "kv_lens": lens, "backend": "webgpu"}
    whole, before = polyflash.attention_paged(q[:, :, 0], *pair, **own), on.launches
    limit(on, monkeypatch, binding_bytes=9 * 16 * 64 * 4)
    large = [torch.cat((x, torch.full((100, *x.shape[1:]), torch.nan))) for x in pair]
    parts = polyflash.attention_paged(q[:, :, 0], *large, **own)
    assert on.launches - before >= 3 and torch.allclose(parts, whole, atol=1e-6)


def test_codes_in_pages_stay_on_the_device(on: Device):
    q, k, v = qkv(1, 131, dims=(16, 16))
    *pair, table = pools(k, v, 16)
    lens = torch.tensor(LENS, dtype=torch.int32)
    multiplied = (Scheme(compute="int8"), Scheme(compute="int8"))
    for schemes in (*(NAMED[name] for name in ("int8-smooth", "int8-channel", "int4")), multiplied):
        q = qkv(30, dims=(16, 16))[0] if schemes is multiplied else q
        coded = [quantize(x.nan_to_num(), s) for x, s in zip(pair, schemes, strict=True)]
        held = [GpuCodes.of(x) for x in coded]
        got = webgpu.attention(GpuTensor.of(q), *held, page_table=table, kv_lens=lens).torch()
        values = [GpuTensor.of(x.values(torch.float32)) for x in coded]
        want = webgpu.attention(GpuTensor.of(q), *values, page_table=table, kv_lens=lens).torch()
        assert torch.allclose(got, want, atol=3e-2 if schemes is multiplied else 1e-5)
