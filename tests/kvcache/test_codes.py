"""A cache of codes holds those of `quantize` over each request's whole sequence, whatever befell it."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyflash import QuantizedTensor, SpecError, UnsupportedError, dequantize, quantize
from polyflash.integrations.flash_attn_cache import flash_attn_with_kvcache
from polyflash.kvcache import KVCache, OutOfPages, Request, Rope, code_pools, heavy_hitters
from polyflash.quant import NAMED, Scheme, codec
from tests import device
from tests.chosen import in_turn
from tests.kvcache.plain import DIM, HEADS, Token, Tokens, append, cache_of, expected, hold, layer_of

LAYERS, PAGE = 2, 8
OF_CPUS = pytest.mark.skipif(bool(device.DEFAULT), reason="of a cache on a CPU")
PAGE_OF_CACHES = Path(__file__).parents[2] / "docs" / "kvcache.md"
INT4 = Scheme(dtype="int4", granularity="channel", tokens=4, symmetric=False)
SCHEMES = {
    "int8": NAMED["int8"],
    "int8-channel": (Scheme(granularity="channel", tokens=8), Scheme()),
    "int4": (INT4, Scheme(dtype="int4", granularity="token", channels=2, symmetric=False)),
    "fp8": (Scheme(dtype="fp8_e4m3", granularity="channel", tokens=4), NAMED["fp8"][1]),
    "rotated": (Scheme(granularity="channel", tokens=2, rotation="hadamard"), Scheme(rotation="hadamard")),
    "blocks": (Scheme(granularity="block", tokens=4, channels=4), INT4),
    "mxfp4": NAMED["mxfp4"],
    "nf4": (Scheme(dtype="nf4", granularity="channel", tokens=8), Scheme(dtype="nf4")),
}


def coded(name: str, pages: int = 16, layers: int = LAYERS, **options: Any) -> KVCache:
    return cache_of(pages, PAGE, layers, quant=SCHEMES[name], **options)


def bits(x: QuantizedTensor) -> list[torch.Tensor]:
    return [y for y in (x.codes.view(torch.uint8), x.scale, x.shift) if y is not None]


def whole(cache: KVCache, tokens: list[Token], layer: int) -> list[QuantizedTensor]:
    """Codes of a sequence quantised at once."""
    pair = zip(layer_of(tokens, layer, cache.dtype), (x.scheme for x in cache.codes), strict=True)
    return [quantize(x[None], scheme, layout="bshd") for x, scheme in pair]


def assert_whole(cache: KVCache, request: Request, tokens: list[Token], end: int | None = None) -> None:
    """Codes of the first `end` tokens, in whole groups or all, equal those of the sequence at once."""
    for layer in range(cache.num_layers):
        got = cache.read_codes(request, layer)
        for pools, x, want in zip(cache.codes, got, whole(cache, tokens, layer), strict=True):
            n = len(tokens) if end is None else end // pools.group * pools.group
            blocks = -(-n // pools.group)
            assert torch.equal(x.codes[:, :, :n].view(torch.uint8), want.codes[:, :, :n].view(torch.uint8))
            assert torch.equal(x.scale[:, :, :blocks], want.scale[:, :, :blocks])
            if x.shift is not None and want.shift is not None:
                assert torch.equal(x.shift[:, :, :blocks], want.shift[:, :, :blocks])


@pytest.mark.parametrize("name, dtype", in_turn(SCHEMES, [torch.float32, torch.bfloat16], of=2), ids=str)
def test_pieces_are_coded_like_the_whole(name: str, dtype: torch.dtype) -> None:
    cache, tokens = coded(name, dtype=dtype), Tokens(LAYERS, dtype=dtype)
    held: dict[Request, list[Token]] = {request: [] for request in cache.add(2)}
    first, second = held
    for counts in ((1, 3), (1, 0), (5, 1), (0, 9), (14, 4), (2, 2), (8, 8)):
        new = {request: tokens.make(n) for request, n in zip(held, counts, strict=True)}
        append(cache, new)
        for request in held:
            held[request] += new[request]
            assert_whole(cache, request, held[request])
    for rows in ([1, 1], [5, 3]):
        q = tokens.queries(sum(rows))
        lists = [values(cache, request, 1) for request in (first, second)]
        want = expected(q, lists, rows)
        got = cache.attend(q.to(dtype), [first, second], counts=rows, layer=1, return_lse=True)
        if dtype is torch.float32:
            hold(got, want)
        assert (got.out.double() - want.out).abs().max() < 0.03


def values(cache: KVCache, request: Request, layer: int = 0) -> list[Token]:
    """What the codes of a layer stand for."""
    k, v = cache.read(request, layer=layer)
    return [Token(x[None].float(), y[None].float()) for x, y in zip(k, v, strict=True)]


@dataclass
class Held:
    """A request's tokens. `rough`: the end of what must equal the whole, where a group that had been full was
    cut; `stale`: its last group was cut while others owned the page, and nothing was appended since."""

    tokens: list[Token] = field(default_factory=list)
    rough: int | None = None
    stale: bool = False

    def copy(self) -> Held:
        return Held([*self.tokens], self.rough, self.stale)


class Fuzz:
    """Random operations on a cache of codes and on lists of tokens."""

    def __init__(self, name: str, seed: int) -> None:
        self.random, self.tokens = random.Random(seed), Tokens(LAYERS, seed)
        self.cache = coded(name, scrub=bool(seed % 2))
        self.held: dict[Request, Held] = {}
        self.swapped: list[tuple[Any, Held]] = []
        self.snapshot: Any = None
        self.known: list[list[Token]] = []
        self.size = max(pools.group for pools in self.cache.codes)

    def one(self) -> Request:
        return self.random.choice(list(self.held))

    def add(self) -> None:
        self.held[self.cache.add()[0]] = Held()

    def append(self) -> None:
        new = {r: self.tokens.make(self.random.randrange(10)) for r in {self.one(), self.one()}}
        append(self.cache, new)
        for request, tokens in new.items():
            self.held[request].tokens += tokens
            self.held[request].stale &= not tokens

    def fail(self) -> None:
        """The layers that had written are as before."""
        requests = [*{self.one(), self.one()}]
        before = {r: [[*map(bits, self.cache.read_codes(r, n))] for n in range(LAYERS)] for r in requests}
        with pytest.raises(InterruptedError), self.cache.reserve(requests, 5) as step:
            for _ in range(2):  # a layer may write twice
                step.write(*layer_of(self.tokens.make(5 * len(requests)), 0), layer=0)
            raise InterruptedError
        for r in requests:
            after = [[*map(bits, self.cache.read_codes(r, n))] for n in range(LAYERS)]
            assert all(map(torch.equal, flat(before[r]), flat(after)))

    def fork(self) -> None:
        parent = self.one()
        self.held[self.cache.fork(parent)[0]] = self.held[parent].copy()

    def truncate(self) -> None:
        request = self.one()
        held = self.held[request]
        old = len(held.tokens)
        n = self.random.randint(max(0, old - 6), old)
        self.cache.truncate(request, n)
        held.tokens = held.tokens[:n]
        if held.rough is not None and n <= held.rough:
            held.rough = None
        if n % self.size and n < old // self.size * self.size:
            held.rough = min(n // self.size * self.size, n if held.rough is None else held.rough)
        if n:
            page = int(self.cache.page_table(request)[0, -1])
            held.stale = self.cache._pages.owners(page) > 1 and (held.stale or n < old)

    def swap(self) -> None:
        request = self.one()
        self.swapped.append((*self.cache.swap_out(request), self.held.pop(request)))

    def swap_in(self) -> None:
        if self.swapped:
            out, held = self.swapped[-1]
            (request,) = self.cache.swap_in([out])
            self.swapped.pop()
            self.held[request] = held

    def free(self) -> None:
        request = self.one()
        self.cache.free(request)
        del self.held[request]

    def keep(self) -> None:
        if self.snapshot is None:
            self.snapshot = self.cache.snapshot(), {r: x.copy() for r, x in self.held.items()}
        else:
            snapshot, held = self.snapshot
            if self.random.random() < 0.7:
                self.cache.restore(snapshot)
                self.held = held
            self.cache.release(snapshot)
            self.snapshot = None

    def prefix(self) -> None:
        held = self.held[request := self.one()]
        if held.rough is None and not held.stale:
            self.known += held.tokens and [[*held.tokens]]
            ids = [id(x) for x in held.tokens]
            self.cache.remember(request, ids)
            made = self.cache.begin([*ids, -1])
            self.held[made] = Held(held.tokens[: self.cache.length(made)])

    def check(self) -> None:
        self.cache.check()
        for request, held in self.held.items():
            assert self.cache.length(request) == len(held.tokens)
            end = None if held.rough is None else held.rough
            if held.stale:
                end = min(len(held.tokens) if end is None else end, len(held.tokens) // self.size * self.size)
            assert_whole(self.cache, request, held.tokens, end)
            for x, want in zip(self.cache.read(request, layer=1), layer_of(held.tokens, 1), strict=True):
                assert x.numel() == 0 or float((x - want).abs().max()) < 2.5
        idle = self.cache.num_free_pages == self.cache.num_pages
        assert not (idle and self.cache.stats().tail_bytes)


def flat(x: Any) -> list[torch.Tensor]:
    return [x] if isinstance(x, torch.Tensor) else [z for y in x for z in flat(y)]


OPERATIONS = ("append", "append", "append", "truncate", "truncate", "fork", "fail", "swap", "swap_in", "free")
OPERATIONS += ("keep", "prefix", "add")


@pytest.mark.parametrize("name", ["int4", "rotated", "blocks", "fp8"])
def test_codes_are_those_of_the_whole_whatever_befalls_a_request(name: str) -> None:
    done = 0
    for seed in range(3):
        fuzz = Fuzz(name, seed)
        for _ in range(80):
            if not fuzz.held or len(fuzz.held) > 5:
                (fuzz.free if fuzz.held else fuzz.add)()
            operation = fuzz.random.choice(OPERATIONS)
            try:
                if fuzz.held or operation in ("add", "swap_in"):
                    getattr(fuzz, operation)()
                    done += 1
            except OutOfPages:
                fuzz.free()
            fuzz.check()
        for request in [*fuzz.held]:
            fuzz.cache.free(request)
        if fuzz.snapshot is not None:
            fuzz.cache.release(fuzz.snapshot[0])
        fuzz.cache.forget()
        assert fuzz.cache.stats().tail_bytes == 0 and fuzz.cache.num_free_pages == 16
    assert done > 120


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_values_made_ready_first_are_coded_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step writes where no quantiser reads values as they lie, as on a GPU."""
    monkeypatch.setattr(code_pools, "quantiser_of", lambda *_: 0)
    test_pieces_are_coded_like_the_whole(name, torch.bfloat16)
    test_rejected_tokens_leave_no_trace()


def test_some_steps_may_be_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a prompt is read in it, and tokens are made without; also by torch's own operations."""
    for quantiser_of in (code_pools.quantiser_of, lambda *_: 0):
        monkeypatch.setattr(code_pools, "quantiser_of", quantiser_of)
        cache, tokens = coded("int8-channel"), Tokens(LAYERS)
        (request,) = cache.add()
        held = tokens.make(6)
        for at in range(6):
            with torch.inference_mode(at % 3 == 0):
                append(cache, {request: held[at : at + 1]})
            tails = [x for pools in cache.codes for x in pools.tails.values()]
            assert tails and not any(x.values.is_inference() for x in tails)
            if at == 2:
                (request,) = cache.fork(request)  # the next step copies the page
        assert_whole(cache, request, held)


@OF_CPUS
@pytest.mark.parametrize("name", ["int8-channel", "int4", "nf4", "blocks"])
def test_codes_stay_where_no_scale_changes(name: str) -> None:
    """A mark among the codes of an unfinished group outlives tokens within its range and none beyond."""
    cache = coded(name, layers=1)
    (request,) = cache.add()
    shapes = [x[0].shape[2:] for x in (cache.k_pages, cache.v_pages)]
    for size in (-2.0, 2.0):
        cache.append(request, *(torch.full((1, *shape), size) for shape in shapes))
    mark = cache.codes[0].stores[0][0][0, 0]
    right = mark.clone()
    mark ^= 0x11
    for size, stays in ((0.5, True), (5.0, False)):
        cache.append(request, *(torch.full((1, *shape), size) for shape in shapes))
        assert torch.equal(mark, right ^ 0x11) is stays
    held = torch.cat([torch.full((1, *shapes[0]), x) for x in (-2.0, 2.0, 0.5, 5.0)])
    got, want = cache.read_codes(request)[0], quantize(held[None], SCHEMES[name][0], layout="bshd")
    assert all(torch.equal(a, b) for a, b in zip(bits(got), bits(want), strict=True))


@pytest.mark.parametrize("name", ["int8-channel", "int4", "blocks"])
def test_a_layer_written_twice_has_the_codes_of_the_last(name: str) -> None:
    """A first write that widened a range leaves nothing of it behind."""
    cache, tokens = coded(name, layers=1), Tokens(1)
    (request,) = cache.add()
    held = tokens.make(2)
    append(cache, {request: held})
    values = layer_of(held, 0, cache.dtype)
    new = [x.mean(0, keepdim=True) for x in values]  # within every range
    with cache.reserve(request, 1) as step:
        step.write(*(50 * x.abs() for x in new))
        step.write(*new)
    pairs = zip(values, new, SCHEMES[name], cache.read_codes(request), strict=True)
    for old, x, scheme, got in pairs:
        want = quantize(torch.cat([old, x])[None], scheme, layout="bshd")
        assert all(torch.equal(a, b) for a, b in zip(bits(got), bits(want), strict=True))


@pytest.mark.parametrize("name", ["int8-channel", "int4", "blocks"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_a_layer_may_be_written_where_it_lies_and_made_ready(name: str, last: bool) -> None:
    """In one step, in either order, which is then taken back or not."""
    cache, tokens = coded(name, layers=1), Tokens(1)
    (request,) = cache.add()
    held = tokens.make(2)
    append(cache, {request: held})
    values = layer_of(held, 0, cache.dtype)
    new = [x.mean(0, keepdim=True) for x in values]
    ways = [50 * x.abs() for x in new], new
    negated = [torch.complex(x, -x).conj().imag for x in ways[last]]  # that no kernel reads as they lie
    assert all(x.is_neg() for x in negated)
    for error in (InterruptedError, None):
        with contextlib.suppress(InterruptedError), cache.reserve(request, 1) as step:
            for at, way in enumerate(ways):
                step.write(*(negated if at == last else way))
            if error is not None:
                raise error
        pairs = zip(values, new, SCHEMES[name], cache.read_codes(request), strict=True)
        for old, x, scheme, got in pairs:
            want = quantize((old if error else torch.cat([old, x]))[None], scheme, layout="bshd")
            assert all(torch.equal(a, b) for a, b in zip(bits(got), bits(want), strict=True))


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_layers_of_a_step_may_have_strides_of_their_own(name: str) -> None:
    """As views of a projection's result have; codes are those of dense values."""
    cache, tokens = coded(name), Tokens(LAYERS)
    (request,) = cache.add()
    held: list[Token] = []
    for n in (3, 6, 1, 1):  # one token is dense to torch, whatever its stride
        new = tokens.make(n)
        with cache.reserve(request, n) as step:
            for layer in range(LAYERS):
                k, v = layer_of(new, layer, cache.dtype)
                if not layer:
                    k, v = (torch.stack([x, x], 1) for x in (k, v))
                    k, v = k[:, 1], v.transpose(2, 3).contiguous().transpose(2, 3)[:, 0]
                step.write(k, v, layer=layer)
        held += new
        assert_whole(cache, request, held)


def test_a_group_that_was_full_keeps_its_codes_when_cut() -> None:
    """Later tokens are coded with what the codes stand for; under a scale that is wide enough none moves."""
    cache, tokens = coded("int8-channel", layers=1), Tokens()
    new = tokens.make(13)
    new[0] = Token(torch.full_like(new[0].k, 6.0), new[0].v)  # sets the scales
    (request,) = cache.add()
    append(cache, {request: new})
    (before, _), (seen, _) = cache.read_codes(request), cache.read(request)
    cache.truncate(request, 5)
    (after, _) = cache.read_codes(request)
    assert torch.equal(after.codes, before.codes[:, :, :5]) and torch.equal(
        after.scale, before.scale[:, :, :1]
    )
    append(cache, {request: tokens.make(2)})
    (later, _) = cache.read_codes(request)
    assert torch.equal(later.codes[:, :, :5], after.codes) and torch.equal(later.scale, after.scale)
    append(cache, {request: [Token(torch.full_like(new[0].k, 9.0), new[0].v)]})
    half = 9.0 / 127 / 2
    assert (cache.read(request)[0][:5] - seen[:5]).abs().max() <= half * 1.001


def test_rejected_tokens_leave_no_trace() -> None:
    """A cut in an unfinished group takes the rejected tokens out of its scales."""
    cache, tokens = coded("int8-channel"), Tokens(LAYERS)
    (request,) = cache.add()
    kept = tokens.make(3)
    append(cache, {request: kept})
    append(cache, {request: [Token(x.k * 1000, x.v) for x in tokens.make(2)]})
    cache.truncate(request, 3)
    assert_whole(cache, request, kept)


@pytest.mark.parametrize("name", ["int8", "int8-channel", "int4", "blocks"])
def test_a_step_taken_back_leaves_the_codes_there_were(name: str) -> None:
    """Of groups whose values are known, and of one that was full and cut."""
    cache, tokens = coded(name), Tokens(LAYERS)
    whole_group, cut = cache.add(2)
    append(cache, {whole_group: tokens.make(3), cut: tokens.make(PAGE)})
    cache.truncate(cut, 5)
    before = [cache.read_codes(r, layer) for r in (whole_group, cut) for layer in range(LAYERS)]
    for requests in ([whole_group], [cut], [whole_group, cut]):
        step = cache.reserve(requests, 2)
        for layer in range(LAYERS):
            shapes = (x[layer].shape[2:] for x in (cache.k_pages, cache.v_pages))
            step.write(*(torch.full((2 * len(requests), *shape), 1e3) for shape in shapes), layer=layer)
        step.rollback()
    after = [cache.read_codes(r, layer) for r in (whole_group, cut) for layer in range(LAYERS)]
    for x, y in zip(itertools.chain(*before), itertools.chain(*after), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(bits(x), bits(y), strict=True))


def test_forks_have_values_of_their_own() -> None:
    """One after the other goes on in the group that they shared, one token at a time."""
    cache, tokens = coded("int8-channel"), Tokens(LAYERS)
    (parent,) = cache.add()
    held = {parent: tokens.make(2)}
    append(cache, held)
    held |= {child: [*held[parent]] for child in cache.fork(parent, 2)}
    for _ in range(7):
        for request in held:
            new = tokens.make(1)
            append(cache, {request: new})
            held[request] = [*held[request], *new]
        for request, known in held.items():
            assert_whole(cache, request, known)


@OF_CPUS
def test_codes_of_a_head_lie_together_in_a_page() -> None:
    """A CPU reads a head at a time; their axes are those of every pool."""
    for codes in (coded("int4").k_pages[0].codes, coded("int8").v_pages[0].codes):
        _, heads, tokens, width = codes.shape
        assert codes.stride() == (heads * tokens * width, tokens * width, width, 1)


def test_bytes_are_those_that_are_held() -> None:
    for name in SCHEMES:
        cache = coded(name, pages=5)
        held = [x for k in range(LAYERS) for x in cache.stores(k)]
        assert sum(x.nbytes for x in held) == cache.stats().num_bytes == cache.bytes_per_token * 5 * PAGE
        assert f"{cache.bytes_per_token:.10g} bytes per token" in repr(cache)
    told = dict(
        re.findall(r"^\| `([a-z0-9-]+)` \| (\d+) \|", PAGE_OF_CACHES.read_text("utf-8"), re.MULTILINE)
    )
    assert told.keys() == NAMED.keys() - {"int8-smooth"}
    for name, size in told.items():
        assert KVCache(4, 64, 1, 128, quant=name).bytes_per_token == int(size)
    assert KVCache(4, 64, 8, 128, quant="int8").bytes_per_token == 2 * 8 * (128 + 4)
    assert KVCache(4, 64, 8, 128, quant="int4").bytes_per_token == 8 * (64 + 128 * 4 / 64 + 64 + 4 * 4)
    assert KVCache(4, 64, 8, 128, dtype=torch.bfloat16).bytes_per_token == 2 * 8 * 128 * 2
    cache, tokens = coded("int4"), Tokens(LAYERS)
    append(cache, dict(zip(cache.add(3), (tokens.make(n) for n in (5, 8, 1)), strict=True)))
    assert cache.stats().tail_bytes == 2 * LAYERS * 4 * HEADS * DIM * 4  # two groups of K are not full


@pytest.mark.parametrize(
    "name, dim, dtype",
    [
        ("rotated", 12, torch.float32),
        ("rotated", 96, torch.bfloat16),
        ("rotated", 80, torch.float16),
        ("int4", 96, torch.bfloat16),
        ("int8", 12, torch.float32),
    ],
    ids=str,
)
def test_keys_are_turned_by_position_before_they_are_coded(name: str, dim: int, dtype: torch.dtype) -> None:
    """In pieces, behind those of a group, by every kind of `Rope`; bits of the codec's own operations."""
    tables = [torch.randn(40, 2).to(dtype) for _ in range(2)]
    ropes = Rope(), Rope(500.0, interleaved=True), Rope(rotary_dim=6), Rope(cos=tables[0], sin=tables[1])
    for rope in (*ropes, Rope(interleaved=True, cos=tables[0], sin=tables[1])):
        cache, keys = KVCache(9, PAGE, HEADS, dim, dtype=dtype, num_layers=2, quant=SCHEMES[name]), []
        (request,) = cache.add()
        for count in (3, 1, 9, 1, 8):
            k, v = (torch.randn(2, count, HEADS, dim).to(dtype) for _ in "kv")
            q, at = torch.randn(count, 4, dim).to(dtype), torch.arange(count) + cache.length(request)
            with cache.reserve(request, count) as step:
                for layer in range(2):
                    turned = step.write(k[layer], v[layer], layer=layer, rope=replace(rope), q=q)
                    assert turned is not None and torch.equal(turned, rope.rotate(q, at))
            keys.append(torch.stack([rope.rotate(x, at) for x in k]))
        whole = torch.cat(keys, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "_KERNELS", {})
            want = quantize(whole, SCHEMES[name][0], layout="bshd")
        for layer in range(2):
            got, at = cache.read_codes(request, layer)[0], torch.tensor([layer])
            assert all(map(torch.equal, bits(got), bits(want.pages(at))))


@pytest.mark.parametrize("changed", ["positions", "tables"])
def test_positions_of_a_step_are_those_of_each_write(changed: str) -> None:
    """A tensor of them may change between layers, and so may the tables."""
    cache, at = coded("rotated"), torch.arange(3)
    cos, sin = torch.randn(2, 9, 4).unbind()
    (request,), rope = cache.add(), Rope(cos=cos, sin=sin)
    (k, v), want = layer_of(Tokens().make(3), 0), list[Any]()
    with cache.reserve(request, 3) as step:
        for layer in range(LAYERS):
            step.write(k, v, layer=layer, rope=rope, positions=at if changed == "positions" else None)
            want.append(quantize(rope.rotate(k, at)[None], SCHEMES["rotated"][0], layout="bshd"))
            if changed == "positions":
                at += 2
            else:
                cos *= 2
    for layer in range(LAYERS):
        assert all(map(torch.equal, bits(cache.read_codes(request, layer)[0]), bits(want[layer])))


def test_shared_prefixes_and_windows_read_codes() -> None:
    cache, tokens = coded("int4", layers=1), Tokens()
    (first,) = cache.add()
    append(cache, {first: tokens.make(21)})
    (second,) = cache.fork(first)
    append(cache, {first: tokens.make(3), second: tokens.make(9)})
    q, who = tokens.queries(2), [first, second]
    lists = [values(cache, request) for request in who]
    assert cache.explain_attend(who, cascade=True).cascade
    hold(cache.attend(q, who, cascade=True, return_lse=True), expected(q, lists, [1, 1]))
    window = {"window": (7, None)}
    hold(cache.attend(q, who, return_lse=True, **window), expected(q, lists, [1, 1], **window))
    cache.free_left(who, 7)
    hold(cache.attend(q, who, return_lse=True, **window), expected(q, lists, [1, 1], **window))
    out = cache.swap_out(who)
    assert [x.start for x in out] == [16, 16] and "tokens" in repr(out[0])
    hold(cache.attend(q, cache.swap_in(out), return_lse=True, **window), expected(q, lists, [1, 1], **window))


def test_tokens_with_scales_of_their_own_can_be_evicted() -> None:
    cache, tokens = coded("int8", layers=1), Tokens()
    (request,) = cache.add()
    append(cache, {request: tokens.make(19)})
    before = [bits(x) for x in cache.read_codes(request)]
    keep = heavy_hitters(torch.rand(19), 9, recent=4)
    cache.evict(request, keep)
    after = cache.read_codes(request)
    for x, (codes, scale) in zip(after, before, strict=True):
        assert torch.equal(x.codes.view(torch.uint8), codes[:, :, keep])
        assert torch.equal(x.scale, scale[:, :, keep])


def test_what_a_cache_of_codes_refuses() -> None:
    for quant, told in (
        ("int9", "one of int8"),
        ("int8-smooth", "all tokens are"),
        (Scheme(), "schemes of K and V"),
        ((Scheme(granularity="head"), Scheme()), "Tokens that come later"),
        ((Scheme(granularity="channel", tokens=16), Scheme()), "multiple of 16"),
    ):
        with pytest.raises(SpecError, match=told):
            cache_of(4, PAGE, quant=quant)
    with pytest.raises(SpecError, match="even number"):
        KVCache(4, 8, 2, 8, head_dim_v=5, quant=SCHEMES["int4"])
    with pytest.raises(SpecError, match="a float"):
        coded("int8", dtype=torch.int8)
    cache, tokens = coded("int4", layers=1), Tokens()
    (request,) = cache.add()
    append(cache, {request: tokens.make(6)})
    with pytest.raises(SpecError, match="per token"):
        cache.evict(request, torch.arange(3))
    with cache.reserve(request) as step:
        step.write(*layer_of(tokens.make(1), 0))
        refused: list[tuple[Any, ...]] = [(cache.attend, tokens.queries(1), request), (cache.read, request)]
        for call, *given in (*refused, (cache.fork, request), (cache.snapshot,), (cache.swap_out, request)):
            with pytest.raises(SpecError, match="step open"):
                call(*given)
        assert cache.attend(tokens.queries(1), step).shape[0] == 1
    (out,) = cache.swap_out(request)
    for other in (coded("int8", layers=1), cache_of(4, PAGE)):
        with pytest.raises(SpecError, match="like the one it came from"):
            other.swap_in([out])


def test_flash_attns_cache_reads_codes() -> None:
    cache, tokens = coded("int8", layers=1), Tokens()
    (request,) = cache.add()
    append(cache, {request: tokens.make(11)})
    q = tokens.queries(1)
    given = {"block_table": cache.page_table(request), "cache_seqlens": cache.kv_lens(request)}
    got = flash_attn_with_kvcache(q[None], *cache.pools(0), **given)
    assert torch.equal(got[0], cache.attend(q, request))
    rows = [dequantize(x) for x in cache.pools(0)]
    whole = [quantize(x, Scheme(), layout="bshd") for x in (torch.randn(3, 9, HEADS, DIM) for _ in range(2))]
    at = torch.tensor([2, 0])
    got = flash_attn_with_kvcache(q[None].expand(2, -1, -1, -1), *whole, cache_batch_idx=at)
    want = flash_attn_with_kvcache(q[None].expand(2, -1, -1, -1), *map(dequantize, whole), cache_batch_idx=at)
    assert torch.allclose(got, want, atol=2e-5) and rows


def test_tokens_like_others_are_checked_for_what_a_step_asks() -> None:
    """Those that were kept as plain ones say nothing of another count of tokens or of gradients."""
    cache = coded("int8")
    (request,) = cache.add()
    k, v = layer_of(Tokens(LAYERS).make(3), 0, cache.dtype)
    for count in (3, 3, 2):
        with contextlib.suppress(InterruptedError), cache.reserve(request, count) as step:
            for layer in range(LAYERS):
                if count == 3:
                    step.write(k, v, layer=layer)
                else:
                    with pytest.raises(SpecError, match=r"\(2, "):
                        step.write(k, v, layer=layer)
            for wrong in (LAYERS, -1, True, "0"):
                with pytest.raises(SpecError, match="layer"):
                    step.write(k, v, layer=wrong)  # type: ignore[arg-type]
            raise InterruptedError
    k.requires_grad_()
    with contextlib.suppress(InterruptedError), cache.reserve(request, 3) as step:
        for _ in range(2):
            with torch.no_grad():
                step.write(k, v)
        with pytest.raises(UnsupportedError, match="gradient"):
            step.write(k, v)
        raise InterruptedError
