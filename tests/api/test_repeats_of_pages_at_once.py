"""Calls over pages like others just before: what `test_repeats_at_once` demands of whole tensors."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from polyflash import SpecError, attention_paged, attention_varlen, counters, quantize, repeats, use_backend
from polyflash.kvcache import KVCache
from polyflash.quant import NAMED
from tests.api import test_repeats, test_repeats_at_once
from tests.api.test_repeats import MOMENTS, whole_way
from tests.device import DEVICE
from tests.tolerance import same_bits

pytest.importorskip("numba")
pool = pytest.importorskip("polyflash.backends.cpu.pool")
decode_repeat = pytest.importorskip("polyflash.backends.cpu.decode_repeat")
if DEVICE.type != "cpu" or pool.again() is None:
    pytest.skip("calls on a CPU whose torch tells its number of threads", allow_module_level=True)

nothing_known, soon = test_repeats.nothing_known, test_repeats_at_once.soon
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 64
OPTIONS = False, False, 0.0, None, None, False


@pytest.fixture
def keyed(monkeypatch):
    """Calls that asked for a key, so were not made at once."""
    asked, key_of = [], repeats.key_of_paged
    monkeypatch.setattr(repeats, "key_of_paged", lambda *x, **y: asked.append(x) or key_of(*x, **y))
    return asked


def pages(
    lens: tuple[int, ...] = (700, 811), columns: int = 60, seed: int = 0, dtype=torch.float32, name: str = ""
) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    count = columns * len(lens)
    q = torch.randn(len(lens), HEADS, DIM, generator=g).to(dtype)
    k, v = (torch.randn(count, PAGE, KV_HEADS, DIM, generator=g).to(dtype) for _ in "kv")
    if name:
        k, v = (quantize(x, s, layout="bshd") for x, s in zip((k, v), NAMED[name], strict=True))
    table = torch.randperm(count, generator=g).int().view(len(lens), columns)
    return q, k, v, table, torch.tensor(lens, dtype=torch.int32)


def known(*given, **options):
    for _ in range(4):
        want = attention_paged(*given, **options)
    return want


def by_itself(*given, **options):
    return whole_way(lambda: attention_paged(*given, **options))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("options", ({}, {"causal": True, "scale": -0.3}, {"backend": "cpu", "softcap": 3.0}))
def test_they_give_the_same(keyed, dtype, options):
    known(*pages(dtype=dtype), **options)
    # Splits of 1024 keys: one request's, several, and again those of before.
    for seed, lens in enumerate(((1, 1024), (1500, 2048), (700, 702), (3100, 3840), (1025, 1025)), 1):
        given = pages(lens, seed=seed, dtype=dtype)
        for _ in range(2):
            keyed.clear()
            got = attention_paged(*given, **options)
            assert not keyed
            want = by_itself(*given, **options)
            assert got.stride() == want.stride() and got.dtype is want.dtype
            same_bits(got, want)


@pytest.mark.parametrize("name", ("int8", "int4-token", "int8-channel", "nf4"))
def test_over_codes(keyed, name):
    known(*pages(dtype=torch.bfloat16, name=name))
    for seed, lens in enumerate(((5, 1000), (2049, 3001)), 1):
        given = pages(lens, seed=seed, dtype=torch.bfloat16, name=name)
        keyed.clear()
        got = attention_paged(*given)
        assert not keyed
        same_bits(got, by_itself(*given))


@pytest.mark.parametrize("name", ("", "int8"))
@pytest.mark.parametrize("most", (0, 1 << 21))
def test_requests_that_differ_in_their_splits(keyed, monkeypatch, name, most):
    monkeypatch.setattr(decode_repeat, "JOB_BYTES", most)
    pool.caller.jobs.clear()
    given = pages(dtype=torch.bfloat16, name=name)
    known(*given)
    keyed.clear()
    for lens in ((700, 1500), (0, 3000), (2048, 2049), (700, 811)):
        other = (*given[:4], torch.tensor(lens, dtype=torch.int32))
        got = attention_paged(*other)
        assert not keyed
        same_bits(got, by_itself(*other))
        keyed.clear()
    (of_these,) = (x for x in repeats._known.values() if isinstance(x, tuple))
    assert len(of_these) == 1 and bool(pool.caller.jobs) is bool(most)


def test_torchs_own_modes_see_a_known_call():
    given = pages()
    want = known(*given)
    graph = make_fx(lambda *x: attention_paged(*x))(*given)
    other = pages(seed=3)
    same_bits(graph(*given), want)
    same_bits(graph(*other), attention_paged(*other))
    with FakeTensorMode():
        assert repeats.at_once(*given[:3], OPTIONS, *given[3:]) is None


def test_other_tables_are_others(keyed):
    q, k, v, table, lens = pages()
    want = known(q, k, v, table, lens)
    for other in (table[:, :30], table[:, :30].contiguous(), torch.cat((table, table), 1)):
        keyed.clear()
        same_bits(attention_paged(q, k, v, other, lens), want)
        assert keyed
        known(q, k, v, other, lens)
        keyed.clear()
        same_bits(attention_paged(q, k, v, other, lens), want)
        same_bits(attention_paged(q, k, v, table, lens), want)
        assert not keyed
    same_bits(known(q, k, v, table, lens.long()), want)
    same_bits(known(q, k, v, table, lens.repeat_interleave(2)[::2]), want)


def test_what_a_first_call_refuses_is_refused(keyed):
    q, k, v, table, lens = pages()
    known(q, k, v, table, lens)
    for wrong in (-1, len(k)):
        bad = table.clone()
        bad[1, 5] = wrong
        with pytest.raises(SpecError, match="page_table"):
            attention_paged(q, k, v, bad, lens)
    bad[1, 5], bad[1, 50] = table[1, 5], -1  # behind the live keys
    keyed.clear()
    same_bits(attention_paged(q, k, v, bad, lens), attention_paged(q, k, v, table, lens))
    assert not keyed
    for wrong in (-1, 60 * PAGE + 1):
        with pytest.raises(SpecError, match="kv_lens"):
            attention_paged(q, k, v, table, torch.tensor([wrong, wrong], dtype=torch.int32))


@pytest.mark.parametrize("name", ("", "int4-token"))
def test_storages_are_not_left(name):
    q, k, v, table, lens = pages(dtype=torch.bfloat16, name=name)
    known(q, k, v, table, lens)
    for n, x in enumerate((q, table, lens)):
        given = [q, k, v, table, lens]
        given[(0, 3, 4)[n]] = short = x.clone()
        assert repeats.at_once(*given[:3], OPTIONS, *given[3:]) is not None
        short.untyped_storage().resize_(short.nbytes - 2)
        with pytest.raises(SpecError, match="storage"):
            attention_paged(*given)
    x = k.scale if name else k
    x.untyped_storage().resize_(x.untyped_storage().nbytes() - 4)
    with pytest.raises(SpecError, match="storage"):
        attention_paged(q, k, v, table, lens)


@pytest.mark.parametrize("moment", sorted(MOMENTS))
def test_whatever_a_key_tells_is_told(moment):
    q, k, v, table, lens = pages()
    want = known(q, k, v, table, lens)

    def found():
        got = repeats.at_once(q, k, v, OPTIONS, table, lens)
        return got is not None and torch.equal(got, want)

    assert found()
    assert MOMENTS[moment](found) is (moment == "no_grad")
    assert found()


def nested(*x: Tensor, **how) -> Tensor:
    return torch.nested.nested_tensor([y.float() for y in x], **how)


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize(
    "make", (lambda x: nested(x[0]), lambda x: nested(x, x), lambda x: nested(x[0], x[1]))
)
def test_nested_tensors_are_refused_in_words(place, make):
    given = list(pages())
    known(*given)
    given[place] = make(given[place])
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32)
    for options in ({}, {"cu_seqlens_q": bounds}):
        with pytest.raises(SpecError, match="nested"):
            attention_paged(*given, **options)


@pytest.mark.parametrize("layout", (torch.strided, torch.jagged))
def test_nested_packed_rows_are_refused_in_words(layout):
    q, bounds = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    for place in range(3):
        given = [q, q, q]
        given[place] = nested(q, q[:3], layout=layout)
        with pytest.raises(SpecError, match="nested"):
            attention_varlen(*given, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    k, v, table, lens = pages()[1:]
    with pytest.raises(SpecError, match="q"):
        attention_paged(quantize(k, NAMED["int8"][0], layout="bshd"), k, v, table, lens)


def test_options_and_backends_are_told_apart(keyed):
    given = pages()
    plain, scaled = known(*given), known(*given, scale=0.5)
    assert not torch.equal(plain, scaled)
    with use_backend("cpu"):
        same_bits(known(*given), plain)
    out, _ = known(*given, return_lse=True)
    same_bits(out, plain)
    keyed.clear()
    same_bits(attention_paged(*given, scale=0.5), scaled)
    assert not keyed
    counters(reset=True)
    for _ in range(3):
        attention_paged(*given)
    assert counters()["calls"] == {"cpu/decode": 3} and not keyed


def test_torchs_number_of_threads_is_followed(keyed):
    given = pages((3000, 3001))
    want, before = known(*given), torch.get_num_threads()
    keyed.clear()
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            same_bits(attention_paged(*given), want)
    finally:
        torch.set_num_threads(before)
    assert not keyed


def test_threads_have_calls_of_their_own():
    mine = pages((3000, 3001))
    known(*mine)
    wrong = []

    def work(seed):
        given = pages((2900 - seed, 3100 - seed), seed=seed)
        want = by_itself(*given)
        wrong.extend(seed for _ in range(30) if not torch.equal(attention_paged(*given), want))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(pool.caller.jobs) <= pool._KEPT_JOBS


@pytest.mark.parametrize("name", (None, "int8", "int4-token"))
def test_layers_of_a_cache(keyed, name):
    cache = KVCache(
        24, 64, num_layers=4, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16, quant=name
    )
    (request,) = cache.add(1)
    g = torch.Generator().manual_seed(1)
    for n in (70, *[1] * 6):
        with cache.reserve(request, n) as step:
            for layer in range(4):
                k, v = (torch.randn(n, KV_HEADS, DIM, generator=g).to(torch.bfloat16) for _ in "kv")
                step.write(k, v, layer=layer)
        for layer in range(4):
            q = torch.randn(1, HEADS, DIM, generator=g).to(torch.bfloat16)
            keyed.clear()
            got = cache.attend(q, request, layer=layer)
            assert n == 70 or not keyed
            same_bits(got, whole_way(lambda: cache.attend(q, request, layer=layer)))  # noqa: B023
