"""Calls like one before them leave out what was checked and decided, and nothing else changes."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch._vmap_internals import _vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import polyflash
from polyflash import (
    SpecError,
    attention,
    attention_paged,
    explain,
    likeness,
    plan,
    repeats,
    torch_ops,
    use_backend,
)
from polyflash.counting import Tally
from polyflash.entry import Bound
from polyflash.plan import Launch
from polyflash.spec import Arguments, keys_to_share
from tests.device import DEVICE, generator
from tests.tolerance import same_bits

try:
    import numba  # noqa: F401
except ImportError:
    pytest.skip("only compiled kernels are known", allow_module_level=True)

SDPA = torch.nn.functional.scaled_dot_product_attention
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16

NAMED = "cpu" if DEVICE.type == "cpu" else "triton"


@pytest.fixture(autouse=True)
def nothing_known():
    repeats._known.clear()
    yield
    repeats._known.clear()


@pytest.fixture
def planned(monkeypatch):
    """The phases of calls that went the whole way."""
    calls, route = [], torch_ops._route

    def counted(*x):
        launch = route(*x)
        calls.append(launch.spec.phase)
        return launch

    monkeypatch.setattr(torch_ops, "_route", counted)
    return calls


def keys(seqlen=300, batch=2, rows=1, dtype=torch.float32, seed=0):
    g = generator(seed)
    sizes = (batch, HEADS, rows, DIM), (batch, KV_HEADS, seqlen, DIM), (batch, KV_HEADS, seqlen, DIM)
    return tuple(torch.randn(size, generator=g).to(dtype) for size in sizes)


def pages(lens=(40, 61), columns=4, seed=0, dtype=torch.float32):
    g = generator(seed)
    q = torch.randn(len(lens), HEADS, DIM, generator=g).to(dtype)
    k, v = (torch.randn(20, PAGE, KV_HEADS, DIM, generator=g).to(dtype) for _ in "kv")
    table = torch.randperm(20, generator=g)[: len(lens) * columns].int().view(len(lens), columns)
    return q, k, v, table, torch.tensor(lens, dtype=torch.int32)


def same(got, want, label=""):
    for x, y in zip(got, want, strict=True):
        same_bits(x, y, label)
        assert x.stride() == y.stride() and x.dtype is y.dtype, label


def whole_way(call):
    """What `call` gives if nothing is known."""
    kept = dict(repeats._known)
    repeats._known.clear()
    try:
        return call()
    finally:
        repeats._known.update(kept)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("causal", (False, True))
def test_known_calls_over_keys_give_the_same(planned, dtype, rows, causal):
    q, k, v = keys(1100, rows=rows, dtype=dtype)
    for lse in (False, True):
        attention(q, k, v, causal=causal, return_lse=lse)
    for seed in (1, 2):
        q, k, v = keys(1100, rows=rows, dtype=dtype, seed=seed)
        planned.clear()
        got = attention(q, k, v, causal=causal, return_lse=True)
        again = attention(q, k, v, causal=causal)
        assert not planned
        want = whole_way(lambda: attention(q, k, v, causal=causal, return_lse=True))  # noqa: B023
        assert planned
        same(got, want)
        same_bits(again, want.out)


def test_a_known_call_reads_the_strides_of_its_own_keys(planned):
    q, k, v = keys(seqlen=300)
    attention(q, k, v)
    planned.clear()
    for make in (
        lambda x: torch.randn(2, KV_HEADS, 500, DIM)[:, :, 100:400].copy_(x),
        lambda x: torch.randn(2, 7, 300, DIM)[:, 2:4].copy_(x),
        lambda x: torch.randn(5, KV_HEADS, 300, DIM)[::3].copy_(x),
    ):
        got = attention(q, make(k), make(v))
        assert not planned
        same_bits(got, whole_way(lambda: attention(q, k, v)))
        attention(q, k, v)
        planned.clear()
    keys_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    got = attention(q, keys_first, v)
    assert planned  # another order of heads and keys is cut up in another way
    same_bits(got, attention(q, k, v))


def test_a_growing_cache_adds_nothing(planned):
    cache = keys(seqlen=1200)
    for seqlen in range(1040, 1100):  # both as a view of a larger one and as a tensor of its own
        k, v = (x[:, :, :seqlen] for x in cache[1:])
        a, b = attention(cache[0], k, v), attention(cache[0], k.contiguous(), v.contiguous())
        same_bits(a, b)
        torch.testing.assert_close(a, SDPA(cache[0], k, v, enable_gqa=True), atol=1e-5, rtol=1e-5)
    assert len(repeats._known) == 1 and len(planned) <= 2
    q, k, v, table, _ = pages()
    for n in range(1, 64):
        lens = torch.tensor([n, 64 - n], dtype=torch.int32)
        attention_paged(q, k, v, table[:, : -(-max(n, 64 - n) // PAGE)], lens)
    assert len(repeats._known) == 2


@pytest.mark.parametrize("rows", (3, 6))
def test_fewer_keys_than_a_walk_is_worth_take_the_other_kernel(planned, rows):
    """12 and 24 rows of a kv head over many more keys are decode's, over fewer they are not."""
    first = keys_to_share(HEADS // KV_HEADS * rows, HEADS // KV_HEADS)
    for seqlen, phase in ((2000, "decode"), (first - 1, "forward"), (first, "decode"), (9, "forward")):
        q, k, v = keys(seqlen=seqlen, rows=rows)
        planned.clear()
        got = [attention(q, k, v) for _ in range(2)]
        assert {x.value for x in planned} <= {phase}, seqlen
        want = whole_way(lambda: attention(q, k, v))  # noqa: B023
        same_bits(got[0], want)
        same_bits(got[1], want)
        assert explain(q, k, v).chosen.name == f"cpu/{phase}"


@pytest.mark.parametrize("lse", (False, True))
def test_known_calls_over_pages_give_the_same(planned, lse):
    attention_paged(*pages(), return_lse=lse, causal=True)
    for lens in ((40, 61), (1, 64), (0, 17)):
        for columns in (4, 6):
            inputs = pages(lens, columns, seed=3)
            planned.clear()
            got = attention_paged(*inputs, return_lse=lse, causal=True)
            assert not planned, (lens, columns)
            want = whole_way(lambda: attention_paged(*inputs, return_lse=lse, causal=True))  # noqa: B023
            same(got if lse else [got], want if lse else [want], str(lens))
    wide = torch.zeros(2, 8, dtype=torch.int32)
    wide[:, ::2] = inputs[3][:, :4]
    spread = torch.tensor([40, 9, 61, 9], dtype=torch.int32)[::2]
    planned.clear()
    got = attention_paged(*inputs[:3], wide[:, ::2], spread, return_lse=lse, causal=True)
    assert not planned
    want = whole_way(
        lambda: attention_paged(*inputs[:3], inputs[3][:, :4], spread, return_lse=lse, causal=True)
    )
    same(got if lse else [got], want if lse else [want])


def test_known_calls_over_pages_are_cut_up_by_their_own_lengths(planned):
    """Requests of one split, of several, and of as many as their neighbours."""
    g = generator(6)
    q = torch.randn(3, HEADS, DIM, generator=g)
    k, v = (torch.randn(400, PAGE, KV_HEADS, DIM, generator=g) for _ in "kv")
    table = torch.randperm(400, generator=g)[:390].int().view(3, 130)
    for lens in ((2000, 30, 1025), (1, 1024, 0), (1025, 2048, 1500), (2080, 2049, 1)):
        lengths = torch.tensor(lens, dtype=torch.int32)
        got = [attention_paged(q, k, v, table, lengths) for _ in range(2)]
        want = whole_way(lambda: attention_paged(q, k, v, table, lengths))  # noqa: B023
        for x in got:
            same_bits(x, want, str(lens))
    assert len(planned) == 5  # the first, and each whole way


def test_options_are_part_of_what_is_known():
    q, k, v, table, lens = pages()
    plain = attention_paged(q, k, v, table, lens)
    for more in ({"softcap": 2.0}, {"scale": 0.5}, {"scale": -0.5}, {"softcap": 2.0, "scale": 0.0}):
        first, second = (attention_paged(q, k, v, table, lens, **more) for _ in range(2))
        same_bits(first, second, str(more))
        assert not torch.equal(first, plain)
    same_bits(attention_paged(q, k, v, table, lens), plain)


def test_a_known_call_refuses_what_a_first_one_does():
    q, k, v, table, lens = pages()
    for _ in range(2):
        attention_paged(q, k, v, table, lens)
    for wrong in (20, -1, 2**31 - 1):
        for column in (0, 2):
            bad = table.clone()
            bad[0, column] = wrong
            with pytest.raises(SpecError, match=f"page {wrong} for request 0 in column {column}"):
                attention_paged(q, k, v, bad, lens)
    bad = table.clone()
    bad[0, 3] = 99  # beyond the 40 live keys
    same_bits(attention_paged(q, k, v, bad, lens), attention_paged(q, k, v, table, lens))
    for wrong in (65, -1):
        with pytest.raises(SpecError, match=f"kv_lens: got {wrong} for request 1"):
            attention_paged(q, k, v, table, torch.tensor([3, wrong], dtype=torch.int32))
    for inputs, name in (
        ((q[:1], k, v, table, lens), "q rows"),
        ((q, k, v[:, :8], table, lens), "page_size"),
        ((q, k, v, table.long(), lens), "page_table"),
        ((q, k, v, table, lens.float()), "kv_lens"),
        ((q, k, v, table, lens[:1]), "kv_lens"),
        ((q, k, v, table, lens.view(2, 1)), "kv_lens"),
        ((q.bfloat16(), k, v, table, lens), "dtype"),
        ((q[..., :32], k, v, table, lens), "head_dim"),
    ):
        with pytest.raises(SpecError, match=name):
            attention_paged(*inputs)
    for name, wrong in (("causal", 0), ("checked", 5), ("return_lse", 1), ("softcap", "2")):
        with pytest.raises((SpecError, TypeError), match=name):
            attention_paged(q, k, v, table, lens, **{name: wrong})


def test_other_bits_and_not_finite_values_are_the_same(planned):
    q, k, v = keys()
    attention(q, k, v)
    v[0, 0, 7, 3], v[1, 1, 9], k[0, 1, 5] = torch.nan, torch.inf, torch.inf
    planned.clear()
    got = attention(q, k, v)
    assert not planned
    same_bits(got, whole_way(lambda: attention(q, k, v)))


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        self.ops = [*getattr(self, "ops", ()), str(function)]
        return function(*args, **(kwargs or {}))


def test_modes_see_a_known_call():
    q, k, v = keys()
    want = attention(q, k, v)
    attention(q, k, v)
    with Seen() as seen:
        attention(q, k, v)
    assert any("polyflash" in op for op in seen.ops)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        attention(q, k, v)
    assert any("polyflash" in event.key for event in prof.key_averages())
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert [attention(q, k, v).dtype for _ in range(2)] == [torch.bfloat16] * 2
    with torch.inference_mode():
        assert [attention(q, k, v).is_inference() for _ in range(2)] == [True] * 2
    same_bits(attention(q, k, v), want)
    got = torch.vmap(attention)(*(x[None].expand(3, *x.shape) for x in (q, k, v)))
    torch.testing.assert_close(got, want.expand(3, *want.shape))
    traced = torch.jit.trace(attention, (q, k, v), check_trace=False)
    other = keys(seed=5)
    torch.testing.assert_close(traced(*other), attention(*other))


@pytest.mark.parametrize("known", (False, True))
@pytest.mark.parametrize("rows", (1, 60))
def test_early_traces_see_a_call_of_real_tensors(known, rows):
    """A graph traced before autograd has its modes on a stack of their own."""
    q, k, v = keys(rows=rows)
    for _ in range(2 * known):
        attention(q, k, v)
    traced = make_fx(lambda *x: attention(*x), pre_dispatch=True)(q, k, v)
    assert any("polyflash" in str(node.target) for node in traced.graph.nodes)
    torch.testing.assert_close(traced(q * 2, k, v), attention(q * 2, k, v))


@pytest.mark.parametrize("rows", (1, 60))
def test_tensors_around_others_go_the_whole_way(rows):
    """They look ordinary, and have no address."""
    q, k, v = keys(rows=rows)
    for _ in range(2):
        want = attention(q, k, v)
    escaped = []
    torch.func.functionalize(lambda *x: [escaped.append(y) or y + 1 for y in x])(q, k, v)
    assert all(type(x) is torch.Tensor and not x.data_ptr() for x in escaped)
    for i in range(3):
        given = [x if n != i else escaped[n] for n, x in enumerate((q, k, v))]
        torch.testing.assert_close(attention(*given), want)
    mapped = _vmap(lambda *x: attention(*x))(*(torch.stack((x, x)) for x in (q, k, v)))
    torch.testing.assert_close(mapped, torch.stack((want, want)))


def test_pages_around_others_go_the_whole_way():
    paged = pages()
    for _ in range(2):
        want = attention_paged(*paged)
    for i in range(4):
        given = [x if n != i else torch._to_functional_tensor(x) for n, x in enumerate(paged)]
        torch.testing.assert_close(attention_paged(*given), want)


def test_gradients_are_not_lost():
    q, k, v = keys()
    attention(q, k, v)
    for i in range(3):
        inputs = [x.clone().requires_grad_(n == i) for n, x in enumerate((q, k, v))]
        for _ in range(2):
            out = attention(*inputs)
            assert out.requires_grad
            out.sum().backward()
        assert inputs[i].grad.abs().sum() > 0
        with torch.no_grad():
            assert not attention(*inputs).requires_grad
    paged = pages()
    attention_paged(*paged)
    with pytest.raises(polyflash.UnsupportedError, match="inference"):
        attention_paged(paged[0].clone().requires_grad_(), *paged[1:])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(polyflash.UnsupportedError):
            attention(dual, k, v)


@pytest.mark.parametrize("options", ({}, {"scale": -0.3, "softcap": 4.0}, {"backend": NAMED}))
@pytest.mark.parametrize("rows", (1, 60))
@pytest.mark.parametrize("wanted", ("q", "kv", "qkv"))
def test_known_calls_with_gradients_give_the_same(planned, options, rows, wanted):
    def step(seed, lse):
        leaves = [
            x.requires_grad_(n in wanted) for n, x in zip("qkv", keys(rows=rows, seed=seed), strict=True)
        ]
        results = attention(*leaves, causal=True, return_lse=lse, **options)
        results = results if lse else (results,)
        above = [torch.randn(x.shape, generator=generator(9)) for x in results]
        asked = [x for x in leaves if x.requires_grad]
        return *(x.detach() for x in results), *torch.autograd.grad(results, asked, above)

    for lse in (False, True):
        step(0, lse)
        for seed in (1, 2):
            planned.clear()
            got = step(seed, lse)
            assert not planned
            same(got, whole_way(lambda: step(seed, lse)))  # noqa: B023
            assert planned


def test_hooks_of_saved_tensors_see_known_calls(planned):
    q, k, v = keys(rows=60)
    q.requires_grad_()
    for _ in range(2):
        attention(q, k, v)
    planned.clear()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        out = attention(q, k, v)
    assert seen and planned
    out.sum().backward()


def test_a_named_backend_is_obeyed(planned):
    q, k, v = keys()
    attention(q, k, v)
    planned.clear()
    with use_backend("torch"):
        attention(q, k, v)
    assert planned
    planned.clear()
    attention(q, k, v, backend="torch")
    assert planned
    paged = pages()
    for backend in (None, "torch", "cpu", "torch"):
        torch.testing.assert_close(
            attention_paged(*paged, backend=backend), attention_paged(*paged), atol=1e-5, rtol=1e-5
        )


def test_odd_tensors_go_the_whole_way(planned):
    q, k, v = keys()
    attention(q, k, v)
    planned.clear()
    negative = torch.complex(torch.zeros_like(q), q).conj().imag
    assert negative.is_neg()
    same_bits(attention(negative, k, v), attention(-q, k, v))
    assert planned
    wrapped = torch.nn.Parameter(k, requires_grad=False)
    same_bits(attention(q, wrapped, v), attention(q, k, v))
    same_bits(attention(q.transpose(0, 1).contiguous().transpose(0, 1), k, v), attention(q, k, v))


def test_calls_inside_of_transforms_on_tensors_from_outside():
    q, k, v = keys()
    paged = pages()
    for known in (False, True):
        for call in (lambda: attention(q, k, v), lambda: attention_paged(*paged)):
            want = call().sum()
            if not known:
                repeats._known.clear()
            got = torch.func.grad(lambda x: call().sum() * x)(torch.tensor(2.0))  # noqa: B023
            torch.testing.assert_close(got, want)


def test_nested_tensors_are_refused_in_words():
    q, k, v = keys()
    attention(q, k, v)
    nested = torch.nested.nested_tensor([k[0], k[1, :, :9]])
    for inputs in ((q, nested, nested), (nested, k, v), (nested, nested, nested)):
        with pytest.raises(SpecError, match="nested"):
            attention(*inputs)


def test_tables_of_other_widths_ask_for_their_own_route(planned):
    """Tuned configs tell few keys from many, and beyond 32-bit positions another row runs."""
    q, k, v, table, lens = pages()
    attention_paged(q, k, v, table, lens)
    planned.clear()
    many = table.new_zeros(2, 80)
    many[:, :4] = table
    want = attention_paged(q, k, v, table, lens)
    assert not planned
    same_bits(attention_paged(q, k, v, many, lens), want)
    assert planned
    planned.clear()
    endless = table[:, :1].expand(2, 2**28)
    few = torch.tensor([7, 16], dtype=torch.int32)
    torch.testing.assert_close(
        attention_paged(q, k, v, endless, few), attention_paged(q, k, v, table, few), atol=1e-5, rtol=1e-5
    )
    assert planned


def test_a_call_within_a_call_has_memory_of_its_own(monkeypatch):
    """As a finalizer makes one that runs while the outer call is put together."""
    from polyflash.backends.cpu import decode

    q, k, v = keys(seqlen=6000)
    want, own = attention(q, k, v), decode._partials

    def interrupted(*x):
        found = own(*x)
        monkeypatch.setattr(decode, "_partials", own)
        attention(q * 2, k, v)
        return found

    monkeypatch.setattr(decode, "_partials", interrupted)
    same_bits(attention(q, k, v), want)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="threads of the CPU")
def test_a_known_call_follows_the_number_of_threads(monkeypatch):
    """Down and up again; a small one stays on its caller."""
    pool = importlib.import_module("polyflash.backends.cpu.pool")
    seen, run, before = [], pool.run, torch.get_num_threads()

    def watched(kernel, block, items, threads, *rest):
        seen.append(threads)
        run(kernel, block, items, threads, *rest)

    monkeypatch.setattr(pool, "run", watched)
    try:
        for rows, wanted in ((256, [1, 1, 3, 3, 1, 2]), (33, [1] * 6)):
            q, k, v = (torch.randn(1, 1, rows, 32) for _ in range(3))
            seen.clear()
            for threads in (1, 1, 3, 3, 1, 2):
                torch.set_num_threads(threads)
                attention(q, k, v)
            assert seen == wanted, f"{rows} rows"
    finally:
        torch.set_num_threads(before)


def test_another_default_device_changes_nothing():
    q, k, v = keys()
    paged = pages()
    want = attention(q, k, v, return_lse=True), attention_paged(*paged, return_lse=True)
    with torch.device("meta"):
        for _ in range(2):
            same(attention(q, k, v, return_lse=True), want[0])
            same(attention_paged(*paged, return_lse=True), want[1])


def test_nothing_keeps_a_callers_tensor():
    paged = pages()
    attention_paged(*paged)
    refs = [weakref.ref(x) for x in paged]
    del paged
    gc.collect()
    assert not any(r() is not None for r in refs)


@pytest.mark.parametrize("seen", (False, True))
def test_what_is_known_has_an_end(monkeypatch, seen):
    """On a GPU a call has two entries."""
    learn = repeats.learn

    def learn_two(*call):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            learn(*call)

    if seen:
        monkeypatch.setattr(repeats, "learn", learn_two)
    monkeypatch.setattr(repeats, "_KEPT", 3)
    sizes = []
    for batch in range(1, 9):
        attention(*keys(batch=batch, dtype=torch.bfloat16))
        sizes.append(len(repeats._known))
    assert min(sizes) >= 1 and max(sizes) <= 3, sizes


def test_threads_forget_and_learn_at_once(monkeypatch):
    """None of them sees what is known change under its hands."""
    monkeypatch.setattr(repeats, "_KEPT", 12)
    row = SimpleNamespace(module="polyflash.spec")  # has no shorter way
    launch, bound = SimpleNamespace(row=row, tally=None), Bound(*keys(seqlen=3), None, Arguments())
    sized = Launch(SimpleNamespace(leaves_sizes=None, by_sizes=None), None, "", None, None, by_sizes={})
    monkeypatch.setattr(plan, "_KEPT_SIZES", 8)
    before = sys.getswitchinterval()

    def work(thread):
        for n in range(8000):
            repeats.learn(((thread, n),), launch, bound, ())
            sized.of_sizes(thread, n, n)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
    finally:
        sys.setswitchinterval(before)


def test_empty_calls_are_not_counted_when_they_come_again():
    q, k, v = keys(seqlen=9)
    paged = pages()
    attention(q, k, v)
    attention_paged(*paged)
    nothing = torch.zeros(2, dtype=torch.int32)
    with polyflash.watch(quiet=True) as watched:
        for _ in range(3):
            assert attention(q[:0], k[:0], v[:0]).shape == (0, *q.shape[1:])
            assert not attention_paged(paged[0], *(x[:0] for x in paged[1:3]), paged[3], nothing).any()
    assert not watched.counters()["calls"]


def test_lengths_of_64_bits_are_not_read_beyond_their_storage():
    *paged, lens = pages()
    for _ in range(3):
        attention_paged(*paged, lens.long())
        short = lens.long()
        short.untyped_storage().resize_(8)
        with pytest.raises(SpecError, match="kv_lens: got a storage of 8 bytes"):
            attention_paged(*paged, short)


def test_python_threads_share_what_is_known():

    def own(seed):
        q, k, v = keys(seqlen=2000, seed=seed)
        want = whole_way(lambda: attention(q, k, v))
        return all(torch.equal(attention(q, k, v), want) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(own, range(8)))


def packed_call() -> tuple[torch.Tensor, ...]:
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    return *(torch.randn(7, 2, 16) for _ in range(3)), bounds, bounds.clone()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="tensors of the CPU stand for those of a GPU")
@pytest.mark.parametrize("lse", [False, True])
def test_packed_calls_of_a_gpu_are_known(monkeypatch, lse: bool):
    """By all that they have, and no other call is; what is known answers in the form of its caller."""
    given, asked, made = packed_call(), [], (torch.zeros(7, 2, 16), torch.zeros(2, 7))
    real = repeats.key_of_packed
    assert real(*given, ()) is None, "on a CPU"

    def key_of(*args):
        asked.append(args)
        return "packed", *args[5]

    def repeat(*tensors):
        assert all(map(torch.equal, tensors, given)) and len(tensors) == 5
        return made

    repeat.tally, repeat.reaches = Tally("", "", ""), tuple(x.nbytes for x in given)
    monkeypatch.setattr(repeats, "key_of_packed", key_of)
    monkeypatch.setitem(repeats._known, ("packed", True, lse, 0.0, None, None, None, 4), repeat)
    found = polyflash.attention_varlen(*given, causal=True, return_lse=lse, max_seqlen_k=4)
    assert (found.out, found.lse) == made if lse else found is made[0]
    assert len(asked) == 1
    for other in (
        {"window": (1, None)},
        {"checked": True},
        {"scale": 1},
        {"max_seqlen_q": True},
        {"batch_invariant": True},
        {"kv_lens": torch.tensor([3, 4], dtype=torch.int32)},
        {"causal": "top_left"},
    ):
        try:
            polyflash.attention_varlen(*given, **other)
        except polyflash.SpecError:
            assert "max_seqlen_q" in other
    assert len(asked) == 1


def test_the_key_of_a_packed_call_tells_all_that_it_has(monkeypatch):
    monkeypatch.setattr(repeats, "quiet", lambda *tensors: tuple(x.dtype for x in tensors))
    q, k, v, cu_q, cu_k = given = packed_call()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    key = repeats.key_of_packed(*given, ())
    assert key is not None and repeats.key_of_packed(*packed_call(), ()) == key
    for other in (
        (q[:6], k, v, cu_q, cu_k),
        (q, k, v, cu_q[:2], cu_k),
        (q, k, v, cu_q, torch.zeros(6, dtype=torch.int32)[::2]),
        (q, k.transpose(0, 1).contiguous().transpose(0, 1), v, cu_q, cu_k),
    ):
        assert repeats.key_of_packed(*other, ()) not in (None, key)
    assert repeats.key_of_packed(*given, (True,)) != key
    assert repeats.key_of_packed(q, k, v, cu_q.long(), cu_k, ()) is None, "kernels read int32"


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def mapped(ask):
    found = []
    torch.func.vmap(lambda x: (found.append(ask()), x)[1])(torch.zeros(1))
    return found[0]


def differentiated(ask):
    found = []
    torch.func.grad(lambda x: (found.append(ask()), x)[1])(torch.zeros(()))
    return found[0]


def traced(ask):
    found = []
    torch.jit.trace(lambda x: (found.append(ask()), x)[1], torch.zeros(1), check_trace=False)
    return found[0]


def within(context):
    def run(ask):
        with context():
            return ask()

    return run


MOMENTS = {
    "a mode": within(Watched),
    "autocast": within(lambda: torch.autocast(DEVICE.type, torch.bfloat16)),
    "inference mode": within(torch.inference_mode),
    "no_grad": within(torch.no_grad),
    "saved tensors' hooks": within(lambda: torch.autograd.graph.saved_tensors_hooks(abs, abs)),
    "forward-mode AD": within(torch.autograd.forward_ad.dual_level),
    "a profiler": within(torch.autograd.profiler.profile),
    "another backend": within(lambda: use_backend("torch")),
    "vmap": mapped,
    "grad": differentiated,
    "a trace": traced,
}


@pytest.fixture
def seen_one():
    """q, k and v of a call that is known, and whether one is seen as its like. (Calls on a CPU have keys.)"""
    q, k, v = (x.requires_grad_() for x in keys(rows=3, dtype=torch.bfloat16))
    options, repeat = (False, False, 0.0, None, None), lambda *tensors: tensors
    kinds = repeats.key_of(q, k, v, options)[0]
    repeats._known[options, q.shape, k.shape] = ((likeness.alike(q, k, v), kinds, repeat),)
    return (q, k, v), lambda *x: repeats.seen(options, *x) is repeat


@pytest.mark.parametrize("moment", MOMENTS)
def test_one_check_sees_whatever_a_key_does(seen_one, moment):
    tensors, seen = seen_one
    assert seen(*tensors)
    assert not MOMENTS[moment](lambda: seen(*tensors))
    assert seen(*tensors)


def test_one_check_sees_what_tensors_are(seen_one):
    (q, k, v), seen = seen_one
    assert seen(*(x.detach().clone().requires_grad_() for x in (q, k, v)))
    others = {
        "dtype": [x.detach().half().requires_grad_() for x in (q, k, v)],
        "no gradient": [x.detach() for x in (q, k, v)],
        "a gradient less": [q, k, v.detach()],
        "device": [x.detach().to("meta").requires_grad_() for x in (q, k, v)],
        "a parameter": [q, torch.nn.Parameter(k), v],
        "strides": [q, k.mT.contiguous().mT, v],
        "rows": [q[:, :, :2], k, v],
        "keys": [q, k[:, :, :9], v[:, :, :9]],
        "channels": [q, k, v[..., :32]],
        "negated": [q, k, torch._neg_view(v)],
        "zero": [q, k, torch._efficientzerotensor(v.shape, dtype=v.dtype).requires_grad_()],
        "one twice": [q, k, k],
        "no tensor": [q, k, None],
        "an inference tensor": [q, k, within(torch.inference_mode)(lambda: v.detach().clone())],
    }
    for why, x in others.items():
        assert not seen(*x), why
    assert likeness.alike(k, k) is None


def test_a_known_call_that_cannot_be_repeated_makes_no_node(monkeypatch):
    q, k, v = (x.requires_grad_() for x in keys())
    monkeypatch.setattr(torch_ops, "_backward_of", lambda *_: None)
    args = Arguments(False, None, False)
    assert torch_ops.trained(lambda *_: None, None, q, k, v, args)(q, k, v) is None
