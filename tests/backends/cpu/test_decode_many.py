"""Decode of 9 rows and more: lanes as rows, splits and their merge, against float64 and against itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from polyflash.backends.cpu import capabilities, decode_configs, decode_many_configs
from polyflash.backends.cpu.configs import ISAS
from polyflash.plan import Launch
from polyflash.spec import Arguments, AttentionSpec, Phase
from tests.backends.cpu.test_forward_kernel import HERE, at_page_end, randn
from tests.backends.cpu.test_paged_kernel import DTYPES, ints, paged
from tests.tolerance import same_bits

pytestmark = pytest.mark.skipif(HERE.arch != "avx512", reason="the kernel needs AVX-512")
ATOL = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def decode(q, k, v, *, split=None, isa=None, target=HERE, **options):
    """(out, lse) of the kernel itself."""
    from polyflash.backends.cpu import decode

    args = Arguments(**{"need_lse": True, **options})
    keys = k.shape[2] * (1 if args.page_table is None else args.page_table.shape[1])
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], keys, q.shape[3], v.shape[3])
    dtype = str(q.dtype).removeprefix("torch.")
    spec = AttentionSpec(Phase.DECODE, dtype, "cpu", *sizes, frozenset(), causal=args.causal)
    config = decode_configs.choose(spec, target)
    config = replace(config, split_keys=split or config.split_keys)
    if isa is not None:
        config = replace(config, isa=isa, compute="f32")
    row = next(row for row in capabilities.CAPABILITIES if row.phase is Phase.DECODE)
    out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:3], math.nan)
    return decode.run(Launch(row, config, "heuristic", target, spec), q, k, v, out, lse, args)


def exact(q, k, v, bounds, *, scale=None, softcap=0.0, sinks=None):
    """In float64, `bounds` (batch, rows, 2) being the keys that a row sees."""
    group, at = q.shape[1] // k.shape[1], torch.arange(k.shape[2])
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~((at >= bounds[:, None, :, :1]) & (at < bounds[:, None, :, 1:])), -math.inf)
    all_s = s if sinks is None else torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(all_s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse


def bounds_of(q, keys, *, causal=False, left=None, lens=None, starts=None, offset=None):
    i, batch = torch.arange(q.shape[2]), q.shape[0]
    live = torch.full((batch,), keys) if lens is None else lens.long()
    lo = torch.zeros(batch, dtype=torch.long) if starts is None else starts.long()
    place = i + (live - q.shape[2] if offset is None else torch.full((batch,), offset))[:, None]
    lo = lo[:, None].expand(batch, q.shape[2])
    hi = torch.minimum(live[:, None], place + 1) if causal else live[:, None].expand_as(lo)
    lo = lo if left is None else torch.maximum(lo, place - left)
    return torch.stack([lo, hi], -1)


def close(got, want, dtype, label):
    out, lse = want
    assert torch.allclose(got[0].double(), out, atol=ATOL[dtype], rtol=0), label
    assert torch.equal(got[1].isinf(), lse.isinf()), label
    assert torch.allclose(got[1].double().nan_to_num(neginf=0.0), lse.nan_to_num(neginf=0.0), atol=4e-3), (
        label
    )


SHAPES = ((8, 2, 4), (4, 1, 3), (4, 2, 8), (4, 4, 12), (2, 1, 40), (8, 2, 11), (2, 1, 150))


@pytest.mark.parametrize("heads, kv_heads, rows", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype, heads, kv_heads, rows):
    sinks = torch.linspace(-2.0, 3.0, heads)
    for keys in (1, 70, 700):
        q = randn(2, heads, rows, 64, dtype=dtype)
        k, v = (randn(2, kv_heads, keys, n, dtype=dtype, seed=n) for n in (64, 40))
        lens, starts = ints(keys, keys // 2), ints(keys // 3, 2)
        for bounds, more in (
            ({}, {}),
            ({"causal": True}, {"sinks": sinks}),
            ({"causal": True, "left": 100, "offset": 300}, {}),
            ({"causal": True, "lens": lens, "starts": starts}, {"softcap": 4.0}),
            ({"lens": lens}, {"scale": -0.3}),
            ({}, {"scale": 0.0}),
        ):
            names = {"left": "window_left", "lens": "kv_lens", "starts": "kv_starts"}
            args = {names.get(name, name): x for name, x in bounds.items()}
            got = decode(q, k, v, split=128, **args, **more)
            close(got, exact(q, k, v, bounds_of(q, keys, **bounds), **more), dtype, (keys, bounds, more))


def test_the_cap_bounds_the_maximum_too():
    """Weights are taken relative to the largest capped score: the raw one is hundreds away."""
    q = randn(1, 4, 5, 64) * 20
    k, v = (randn(1, 2, 300, 64, seed=i) for i in (1, 2))
    want = exact(q, k, v, bounds_of(q, 300), softcap=3.0)
    close(decode(q, k, v, softcap=3.0), want, torch.float32, "softcap")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_of_rows(dtype):
    generator = torch.Generator().manual_seed(5)
    for rows in (5, 70):
        q = randn(1, 4, rows, 64, dtype=dtype)
        k, v = (randn(1, 2, 700, 64, dtype=dtype, seed=i) for i in (1, 2))
        bounds = torch.stack([torch.randint(-9, 700, (rows,), generator=generator) for _ in range(2)], 1)
        bounds[0] = torch.tensor([0, 2**31 - 1])
        got = decode(q, k, v, row_bounds=bounds.int())
        close(got, exact(q, k, v, bounds.clamp(0, 700)[None]), dtype, rows)


@pytest.mark.parametrize("page_size", (1, 7, 16, 100, 128))
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_change_no_bit(dtype, page_size):
    q = randn(2, 4, 6, 64, dtype=dtype)
    k, v = (randn(2, 2, 601, n, dtype=dtype, seed=n) for n in (64, 40))
    v[:, :, 5::37, 3], v[0, 1, 595, 1] = math.inf, math.nan
    (k_pool, table), (v_pool, _) = paged(k, page_size), paged(v, page_size, gap=1)
    for lens in (ints(601, 130), ints(0, 300)):
        want = decode(q, k, v, kv_lens=lens, causal=True)
        got = decode(q, k_pool, v_pool, kv_lens=lens, causal=True, page_table=table)
        for x, y in zip(got, want, strict=True):
            same_bits(x, y, f"lens {lens}")
        table[0, -1] = 2**31 - 1  # beyond the live length from now on


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_no_row_sees_changes_no_bit(dtype):
    q = randn(1, 4, 5, 64, dtype=dtype)
    k, v = (at_page_end(randn(1, 2, 300, 64, dtype=dtype, seed=i)) for i in (1, 2))
    args = {"kv_lens": ints(290), "kv_starts": ints(10), "causal": True}
    want, lse = decode(q, k, v, **args)
    k[:, :, 290:], v[:, :, 290:], k[:, :, :10], v[:, :, :10] = math.nan, math.inf, math.inf, math.nan
    got, got_lse = decode(q, k, v, **args)
    same_bits(got, want, "out")
    same_bits(got_lse, lse, "lse")
    v[:, :, 289, 7] = math.nan  # the last row alone sees it
    got, _ = decode(q, k, v, **args)
    assert got[:, :, 4, 7].isnan().all()
    same_bits(got[:, :, :4], want[:, :, :4], "the rows that do not see it")
    got[:, :, 4, 7] = want[:, :, 4, 7]
    assert torch.allclose(got.float(), want.float(), atol=ATOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_neither_threads_nor_neighbours_nor_strides(dtype):
    q = randn(3, 4, 6, 64, dtype=dtype)
    k, v = (randn(3, 2, 1100, 64, dtype=dtype, seed=i) for i in (1, 2))
    want, lse = decode(q, k, v, causal=True)
    for b in range(3):
        alone = decode(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True)
        same_bits(alone[0], want[b : b + 1], "alone")
        same_bits(alone[1], lse[b : b + 1], "lse alone")
    wide = torch.empty(3, 1100, 2, 128, dtype=dtype)
    spread = [wide[..., i::2].transpose(1, 2).copy_(x) for i, x in enumerate((k, v))]
    rows = torch.empty(3, 6, 4, 64, dtype=dtype).transpose(1, 2).copy_(q)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        same_bits(decode(rows, *spread, causal=True)[0], want, "strides, one thread")
    finally:
        torch.set_num_threads(before)


def test_a_narrower_set_decodes():
    q = randn(1, 4, 5, 40)
    k, v = (randn(1, 2, 300, 40, seed=i) for i in (1, 2))
    got = decode(q, k, v, split=128, isa="avx2", causal=True)
    close(got, exact(q, k, v, bounds_of(q, 300, causal=True)), torch.float32, "avx2")


def test_tiles_hold_all_rows():
    for isa, kind in ISAS.items():
        for rows in (*range(1, 300), 1000, 4096):
            nv, panels, chunks = decode_many_configs.shape(isa, rows)
            held = nv * kind.lanes * panels
            assert held * chunks >= rows > held * (chunks - 1)
            assert held <= decode_many_configs.ITEM_ROWS


def test_items_of_codes_are_longer():
    from polyflash.backends.cpu import decode as host

    found = {}
    for codes in ("", "int8/1x0,int8/1x0", "nf4/1x0,nf4/1x0"):
        spec = AttentionSpec(
            Phase.DECODE, "bfloat16", "cpu", 1, 2, 2, 1, 8192, 64, 64, frozenset(), codes=codes
        )
        config = decode_configs.choose(spec, HERE)
        found[codes] = host.Prepared(config, spec, HERE).cut(1).items_per_thread
    assert found == {"": 16, "int8/1x0,int8/1x0": 8, "nf4/1x0,nf4/1x0": 16}
