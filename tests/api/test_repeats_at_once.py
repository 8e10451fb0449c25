"""Calls whose every size and stride was that of others just before: one check, one native call."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from dataclasses import replace

import pytest
import torch

from polyflash import SpecError, attention, counters, quantize, repeats, use_backend, watch
from polyflash.quant import NAMED, Scheme
from tests.api import test_repeats
from tests.api.test_repeats import MOMENTS, keys
from tests.api.test_repeats_of_codes import coded
from tests.chosen import chosen
from tests.device import DEVICE
from tests.tolerance import same_bits

pytest.importorskip("numba")
pool = pytest.importorskip("polyflash.backends.cpu.pool")
decode_repeat = pytest.importorskip("polyflash.backends.cpu.decode_repeat")
if DEVICE.type != "cpu" or pool.again() is None:
    pytest.skip("calls on a CPU whose torch tells its number of threads", allow_module_level=True)


nothing_known = test_repeats.nothing_known


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(decode_repeat, "OFTEN", 1)


@pytest.fixture
def keyed(monkeypatch):
    """Calls that asked for a key, so were not made at once."""
    asked, key_of = [], repeats.key_of
    monkeypatch.setattr(repeats, "key_of", lambda *x: asked.append(x) or key_of(*x))
    return asked


def known(*tensors, **options):
    """What is known at once from now on, and its result."""
    for _ in range(4):
        want = attention(*tensors, **options)
    return want


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("seqlen", (9, 300, 5000))
@pytest.mark.parametrize("options", ({}, {"backend": "cpu", "scale": -0.3}, {"causal": True, "softcap": 3.0}))
def test_they_give_the_same(keyed, dtype, seqlen, options):
    rows = 1 if seqlen < 300 else 3
    given = keys(seqlen, rows=rows, dtype=dtype)
    known(*given, **options)
    for seed in (1, 2):
        given = keys(seqlen, rows=rows, dtype=dtype, seed=seed)
        keyed.clear()
        got = attention(*given, **options)
        assert not keyed
        repeats._known.clear()
        want = attention(*given, **options)
        assert got.stride() == want.stride() and got.dtype is want.dtype
        same_bits(got, want)
        known(*given, **options)
    rows_first = [x.transpose(1, 2).contiguous() for x in given]
    same_bits(known(*rows_first, **options, layout="bshd"), want.transpose(1, 2))


def test_other_strides_and_lengths_are_others(keyed):
    q, k, v = keys(2000)
    want = known(q, k, v)
    for x, y in (
        (k[:, :, :1999], v[:, :, :1999]),
        (k, v.mT.contiguous().mT),
        (k, k),
        (torch.cat((k, k), 2),) * 2,
    ):
        keyed.clear()
        attention(q, x, y)
        assert keyed
    wide = torch.cat((k, k), 1)[:, :2]
    same_bits(known(q, wide, v), want)
    keyed.clear()
    same_bits(attention(q, k, v), want)
    same_bits(attention(q, wide, v), want)
    assert not keyed


SEEN_NO_MORE = sorted(set(MOMENTS) - {"no_grad"})


@pytest.mark.parametrize("moment", MOMENTS)
def test_whatever_a_key_tells_is_told(moment):
    given, options = keys(), (False, False, 0.0, None, None)
    want = known(*given)

    def found():
        got = repeats.at_once(*given, options)
        return got is not None and torch.equal(got, want)

    assert found()
    assert MOMENTS[moment](found) is (moment not in SEEN_NO_MORE)
    assert found()


def test_nested_tensors_are_refused_in_words():
    q, k, v = keys()
    known(q, k, v)
    nested = torch.nested.nested_tensor([k[0], k[0, :, :9]])
    for given in ((q, nested, v), (q, k, nested), (nested, k, v)):
        with pytest.raises(SpecError, match="nested"):
            attention(*given)


def test_gradients_are_not_lost():
    q, k, v = keys()
    known(q, k, v)
    for i in range(3):
        given = [x.clone().requires_grad_(n == i) for n, x in enumerate((q, k, v))]
        attention(*given).sum().backward()
        assert given[i].grad.abs().sum() > 0
        with torch.no_grad():
            assert not attention(*given).requires_grad
        for odd in (torch.nn.Parameter(given[i].detach()), torch._neg_view(given[i].detach())):
            same = [odd if n == i else x.detach() for n, x in enumerate(given)]
            assert repeats.at_once(*same, (False, False, 0.0, None, None)) is None


def test_a_backend_in_use_is_obeyed(keyed):
    given = keys()
    want = known(*given)
    with use_backend("cpu"):
        same_bits(known(*given), want)
        keyed.clear()
        attention(*given)
    attention(*given)
    assert not keyed
    with use_backend("torch"):
        attention(*given)
    assert keyed
    assert len(repeats._known[False, False, 0.0, None, None]) == 2


def test_each_is_counted_once():
    given = keys()
    known(*given)
    counters(reset=True)
    with watch() as seen:
        for _ in range(3):
            attention(*given)
    assert counters()["calls"] == seen.counters()["calls"] == {"cpu/decode": 3}


@pytest.mark.parametrize("seqlen", (9, 4000))
def test_torchs_number_of_threads_is_followed(keyed, monkeypatch, seqlen):
    given, made = keys(seqlen), []
    want, job = known(*given), pool.job
    monkeypatch.setattr(pool, "job", lambda *x: made.append(x[1]) or job(*x))
    before = torch.get_num_threads()
    keyed.clear()
    try:
        for threads in (1, 1, 3, 3, 2):
            torch.set_num_threads(threads)
            same_bits(attention(*given), want)
    finally:
        torch.set_num_threads(before)
    assert made == [1, 3, 2][before == 1 :] and not keyed


def test_a_call_within_a_call_has_memory_of_its_own(monkeypatch):
    from polyflash.backends.cpu import decode_repeat

    q, k, v = keys(6000)
    empty_of, within = decode_repeat.empty_of, []

    def makes(device):
        empty = empty_of(device)

        def interrupted(*x):
            if within:
                within.append(attention(within.pop(), k, v))
            return empty(*x)

        return interrupted

    monkeypatch.setattr(decode_repeat, "empty_of", makes)
    want, other = known(q, k, v), attention(q * 2, k, v)
    for _ in range(3):
        within[:] = [q * 2]
        got = attention(q, k, v)
        same_bits(got, want)
        same_bits(within.pop(), other)


def test_layers_with_growing_caches_make_nothing_for_each_token(monkeypatch):
    monkeypatch.undo()
    pool.caller.jobs.clear()
    layers = [keys(310, seed=seed) for seed in range(12)]
    for seqlen in (300, 301, 302):
        for q, k, v in layers:
            attention(q, k[:, :, :seqlen], v[:, :, :seqlen])
    assert not pool.caller.jobs and len(repeats._known) == 1


def test_what_threads_keep_has_an_end():
    cache = keys(2000)
    for seqlen in range(1900, 1950):
        known(cache[0], cache[1][:, :, :seqlen], cache[2][:, :, :seqlen])
    assert 0 < len(pool.caller.jobs) <= pool._KEPT_JOBS and len(repeats._known) == 2
    found = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(len(pool.caller.jobs)))
        thread.start()
        thread.join()
    assert found == [0, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_makes_its_own(keyed):
    given = keys(5000)
    want = known(*given)
    child = os.fork()
    if child == 0:
        alike = False
        with contextlib.suppress(BaseException):
            kept = len(pool.caller.jobs)
            alike = kept == 0 and all(torch.equal(attention(*given), want) for _ in range(3))
        os._exit(0 if alike else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not pool.caller.jobs
    keyed.clear()
    same_bits(attention(*given), want)
    assert not keyed


class TestCodes:
    OPTIONS = False, False, 0.0, None, None

    @pytest.mark.parametrize("name", chosen(NAMED, "int8-smooth", "int8-channel", "int4", "nf4"))
    def test_they_give_the_same(self, keyed, name):
        options = {"causal": True, "scale": -0.3}
        known(*coded(name, 1100), **options)
        for seed in (1, 2):
            q, k, v = coded(name, 1100, seed=seed)
            keyed.clear()
            got = attention(q, k, v, **options)
            mixed = attention(q, k, replace(v, scale=v.scale.clone() * 2), **options)
            assert not keyed
            repeats._known.clear()
            same_bits(got, attention(q, k, v, **options))
            same_bits(mixed, attention(q, k, replace(v, scale=v.scale * 2), **options))
            known(*coded(name, 1100), **options)

    def test_beside_tensors_and_other_schemes(self, keyed):
        calls = [keys(1100, rows=1, dtype=torch.bfloat16), *(coded(x, 1100) for x in ("int8", "int4-token"))]
        q, k, v = calls[-1]
        calls += [(q, replace(k, shift=k.shift + 1), v), coded("nf4", 1100)]
        wants = [known(*call) for call in calls]
        keyed.clear()
        for call, want in zip(calls, wants, strict=True):
            same_bits(attention(*call), want)
        assert not keyed

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_whatever_a_key_tells_is_told(self, moment):
        given = coded("int4-token", 1100)
        want = known(*given)

        def found():
            got = repeats.at_once(*given, self.OPTIONS)
            return got is not None and torch.equal(got, want)

        assert found()
        assert MOMENTS[moment](found) is (moment not in SEEN_NO_MORE)
        assert found()

    def test_codes_of_one_form_are_not_those_of_another(self, monkeypatch):
        q, k, v = coded("int8", 1100)
        known(q, k, v)
        twin = quantize(k.values(torch.bfloat16), Scheme(rotation="hadamard"))
        assert repeats.at_once(q, k, v, self.OPTIONS) is not None
        for other in (twin, replace(k, layout="bshd"), k.codes):
            assert repeats.at_once(q, other, v, self.OPTIONS) is None
        made, alike = [], repeats.alike
        monkeypatch.setattr(repeats, "alike", lambda *x: made.append(x) or alike(*x))
        for _ in range(4):
            got = attention(q, twin, v)
            assert repeats.at_once(q, twin, v, self.OPTIONS) is None
        assert not made  # of a rotated one, whose q is another
        repeats._known.clear()
        same_bits(got, attention(q, twin, v))

    def test_storages_and_gradients(self):
        q, k, v = coded("int4-token", 1100)
        known(q, k, v)
        for side, name in itertools.product("kv", ("codes", "scale", "shift")):
            kv = {"k": k, "v": v}
            x = getattr(kv[side], name).clone()
            kv[side] = replace(kv[side], **{name: x})
            assert repeats.at_once(q, kv["k"], kv["v"], self.OPTIONS) is not None
            x.untyped_storage().resize_(x.untyped_storage().nbytes() - 4)
            with pytest.raises(SpecError, match="storage"):
                attention(q, kv["k"], kv["v"])
        short = q.clone()
        short.untyped_storage().resize_(short.nbytes - 2)
        with pytest.raises(SpecError, match="storage"):
            attention(short, k, v)
        source = torch.randn(k.shape, dtype=torch.bfloat16, requires_grad=True)
        trained = quantize(source, k.scheme)
        assert repeats.at_once(q, trained, v, self.OPTIONS) is None
        assert attention(q, trained, v).requires_grad
