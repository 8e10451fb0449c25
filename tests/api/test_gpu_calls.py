"""The way of a call on a GPU, without one: no dispatcher, the tensor's device is current, no host reads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import polyflash
from polyflash import quantize, repeats, routes, torch_ops
from polyflash.counting import Tally
from polyflash.kvcache import KVCache, Rope
from polyflash.plan import Launch
from polyflash.quant import NAMED, codec
from polyflash.results import NO_LSE, outputs

NAMED_OF_CACHES = ("int8", "int8-channel", "int4", "int4-token", "fp8", "nf4", "mxfp4")


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Meta tensors stand for those of a GPU that no call has seen; the devices whose keys were asked for."""
    asked: list[object] = []
    real = routes.plain_keys

    def keys(device: object) -> set[int]:
        asked.append(device)
        return real(device)

    monkeypatch.setattr(routes, "PLAIN_KEYS", set(routes.PLAIN_KEYS))
    monkeypatch.setattr(routes, "_UNSEEN", {"meta"})
    monkeypatch.setattr(routes, "plain_keys", keys)
    return asked


def skips(*tensors: torch.Tensor) -> bool:
    q, *others = tensors
    return torch_ops._skips_dispatcher(q, q, q, (False, None, False, *others))


def test_the_first_tensor_of_a_device_tells_the_keys_of_all(unseen):
    x = torch.empty(2, device="meta")
    assert skips(x) and skips(x, torch.empty(1, device="meta")) and unseen == [x.device]
    with torch.inference_mode():
        assert skips(torch.empty(2, device="meta"))
    assert skips(torch.empty(2)) and len(unseen) == 1


def test_the_first_tensor_may_be_an_odd_one(unseen):
    odd = torch._neg_view(torch.empty(2, device="meta"))
    assert not skips(odd) and skips(torch.empty(2, device="meta")) and not skips(odd) and len(unseen) == 1


def test_keys_are_learnt_under_inference_mode_too(unseen):
    with torch.inference_mode():
        assert skips(torch.empty(2, device="meta"))
    assert skips(torch.empty(2, device="meta"))


def test_other_devices_take_the_dispatcher(unseen, monkeypatch):
    monkeypatch.setattr(routes, "_UNSEEN", {"cuda"})
    assert not skips(torch.empty(2, device="meta")) and unseen == []


def test_no_lse_is_one_tensor_for_every_device():
    q = torch.empty(1, 2, 3, 8, device="meta")
    assert outputs(q, 4, False)[1] is NO_LSE and outputs(q, 4, True)[1].shape == (1, 2, 3)
    assert torch.ops.polyflash.attention(q, q, q)[1].device == q.device, "an op's results are on its device"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch):
    """Calls a launch whose device 0 is current, on tensors of a device; the device it saw as current."""
    current = [0]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch_ops, "autocasting", lambda device: False)

    def call(kind: str, index: int, fail: bool = False) -> int:
        def run(launch: Launch, x: object) -> int:
            if fail:
                raise LookupError("planted")
            return current[0]

        launch = SimpleNamespace(spec=SimpleNamespace(device=kind), run=run, tally=Tally("", "", ""))
        return torch_ops.launched(launch, SimpleNamespace(device=torch.device(kind, index)))

    yield call
    assert current == [0]


def test_a_kernel_runs_with_its_own_device_current(guarded):
    assert guarded("cuda", 0) == 0 and guarded("cuda", 3) == 3 and guarded("xpu", 2) == 0
    with pytest.raises(LookupError):
        guarded("cuda", 1, fail=True)


def test_contents_on_a_device_are_read_only_if_asked(monkeypatch):
    """A read would wait for the device: it happens under `checked=True`, and on a CPU."""
    from polyflash import validate

    read: list[str] = []
    monkeypatch.setattr(validate, "check_contents", lambda *_: read.append("read"))

    def call(device: str, **options: object) -> int:
        read.clear()
        place = "cpu" if device == "cpu" else "meta"  # which stands for a GPU
        q, lens = torch.empty(1, 1, 2, 8, device=place), torch.ones(1, dtype=torch.int32, device=place)
        args = torch_ops.Arguments(kv_lens=lens, **options)
        spec = SimpleNamespace(device=device)
        launch = SimpleNamespace(spec=spec, run=lambda *_: None, tally=Tally("", "", ""), contents=True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
        torch_ops._run(launch, q, q, q, q, NO_LSE, args)
        return len(read)

    assert [call("cpu"), call("cuda"), call("cuda", checked=True)] == [1, 0, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_calls_on_a_gpu_skip_the_dispatcher(monkeypatch):
    q = torch.randn(1, 2, 64, 64, device="cuda", requires_grad=True)
    assert torch_ops._skips_dispatcher(q, q, q, (False, None, False))

    def refuse(*_: object) -> None:
        raise AssertionError("through the dispatcher")

    monkeypatch.setattr(torch_ops, "_attention", refuse)
    monkeypatch.setattr(torch_ops, "_attention_backward", refuse)
    polyflash.attention(q, q, q).sum().backward()
    with torch.inference_mode():
        polyflash.attention(q, q, q)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 128])
def test_known_calls_in_two_launches(rows):
    """Keys in splits, merged by a second kernel: the same bits in every call, whatever the stride of a
    dimension of size 1 and the stream are."""
    q, k, v = (
        torch.randn(1, h, n, 64, device="cuda").bfloat16() for h, n in ((8, rows), (2, 4096), (2, 4096))
    )
    out, (first, lse) = polyflash.attention(q, k, v), polyflash.attention(q, k, v, return_lse=True)
    for x in (q, q, q.clone(), q.as_strided(q.shape, (7, *q.stride()[1:]))):
        assert torch.equal(polyflash.attention(x, k, v), out)
        again = polyflash.attention(x, k, v, return_lse=True)
        assert torch.equal(again.out, first) and torch.equal(again.lse, lse)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = [polyflash.attention(q, k, v) for _ in range(3)]
    side.synchronize()
    assert all(torch.equal(x, out) for x in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lse", [False, True])
def test_known_calls_of_a_gpu_need_no_key(monkeypatch, lse):
    """Nor do their gradients, of which all are wanted: the same bits as the whole way's."""
    q, k, v = (torch.randn(1, 4, 256, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    cotangents = [torch.randn_like(q), torch.randn(1, 4, 256, device="cuda")][: 1 + lse]

    def call():
        results = polyflash.attention(q, k, v, return_lse=lse)
        results = [*results] if lse else [results]
        given = [x.to(y.device) for x, y in zip(cotangents, results, strict=True)]  # the suite's are copies
        return [x.detach() for x in results] + [*torch.autograd.grad(results, (q, k, v), given)]

    want = call()
    for _ in range(3):
        call()
    for module, name in ((repeats, "key_of"), (torch_ops, "_gradients_of"), (torch_ops, "_route")):
        monkeypatch.setattr(module, name, lambda *_, name=name: pytest.fail(name))
    for x, y in zip(call(), want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["int8", "int8-channel", "fp8", "int4-token", "int4", "mxfp4"])
def test_known_calls_over_codes_read_their_own(monkeypatch, name):
    """Over whole tensors and a cache, with the bits of the whole way."""
    cache = KVCache(
        16, 64, num_kv_heads=2, head_dim=64, num_layers=4, dtype=torch.bfloat16, quant=name, device="cuda"
    )
    requests = cache.add(2)
    with cache.reserve(requests, 150) as step:
        for layer in range(4):
            step.write(*(torch.randn(300, 2, 64, device="cuda").bfloat16() for _ in "kv"), layer=layer)
    calls = []
    for layer in range(4):
        q = torch.randn(2, 8, 1, 64, device="cuda").bfloat16()
        pair = zip("kv", NAMED[name], strict=True)
        k, v = (quantize(torch.randn(2, 2, 500, 64, device="cuda").bfloat16(), scheme) for _, scheme in pair)
        calls.append(lambda q=q, k=k, v=v: polyflash.attention(q, k, v))
        calls.append(lambda q=q, layer=layer: cache.attend(q[:, :, 0], requests, layer=layer))
    want = []
    for call in calls:
        repeats._known.clear()
        want.append(call())
    for call in calls[:4]:  # the first of each kind is learnt, the second recorded
        call()
    monkeypatch.setattr(torch_ops, "call_plain", lambda *_: pytest.fail("the whole way"))
    monkeypatch.setattr(repeats, "quiet", lambda *_, **__: pytest.fail("a key"))
    for call, result in zip(calls, want, strict=True):
        assert torch.equal(call(), result)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [None, *NAMED_OF_CACHES])
def test_steps_of_a_cache_repeat_the_writes_of_others(name, monkeypatch):
    """In every layer and step, with the codes of the whole sequence; tokens are turned on their way."""
    size = {"num_kv_heads": 2, "head_dim": 64, "num_layers": 4, "dtype": torch.bfloat16, "device": "cuda"}
    cache, rope, held = KVCache(16, 64, quant=name, **size), Rope(), []
    requests = cache.add(3)
    for at in range(70):  # over the end of a group
        if at == 3:
            quantize_, like = import_module("polyflash.backends.triton.quantize"), cache.writes.told
            monkeypatch.setattr(quantize_, "_launch", lambda *_: pytest.fail("the whole way"))
            told = partial(lambda like, *x: like(*x) or pytest.fail("checked"), like)
            monkeypatch.setattr(cache.writes, "told", told)
        new = torch.randn(4, 2, 3, 2, 64, device="cuda").bfloat16()
        q = torch.randn(3, 4, 64, device="cuda").bfloat16()
        with cache.reserve(requests, 1) as step:
            for layer, (k, v) in enumerate(new):
                turned = step.write(k, v, layer=layer, rope=rope, q=q)
                assert torch.equal(turned, rope.rotate(q, step.positions))
            held.append(torch.stack([torch.stack((rope.rotate(k, step.positions), v)) for k, v in new]))
    keys, values = torch.stack(held, 3).transpose(0, 1)  # (layers, requests, tokens, heads, channels)
    for layer in range(4):
        for request, k, v in zip(requests, keys[layer], values[layer], strict=True):
            if name is None:
                assert all(map(torch.equal, cache.read(request, layer=layer), (k, v)))
                continue
            for got, x, scheme in zip(cache.read_codes(request, layer), (k, v), NAMED[name], strict=True):
                want = quantize(x[None].cpu(), scheme, layout="bshd")
                parts = ((getattr(y, p) for p in ("codes", "scale", "shift")) for y in (got, want))
                for a, b in zip(*parts, strict=True):
                    assert a is b is None or torch.equal(a.cpu().float(), b.float())


def test_the_key_of_coded_keys_tells_where_their_tables_lie(monkeypatch):
    """A replayed kernel has the strides that were recorded; rotated and trained calls are not known."""
    monkeypatch.setattr(repeats, "quiet", lambda q, *_, **__: (q.dtype, q.requires_grad))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    x, q = torch.randn(1, 2, 64, 32).bfloat16(), torch.randn(1, 4, 1, 32).bfloat16()
    monkeypatch.setattr(codec, "one_pass", lambda device: None)
    k = quantize(x, NAMED["int4-token"][0])
    wide = replace(k, scale=torch.stack((k.scale, k.scale), -1)[..., 0])
    key, given, _ = repeats.of_codes(q, k, k, ())
    assert key is not None and [id(t) for t in given[3:]] == [id(t) for t in (k.scale, k.shift) * 2]
    assert repeats.of_codes(q, k, k, ())[0] == key and repeats.of_codes(q, wide, k, ())[0] not in (None, key)
    turned = replace(k, scheme=replace(k.scheme, rotation="hadamard"))
    assert repeats.of_codes(q, turned, k, ())[0] is None
    assert repeats.of_codes(q.requires_grad_(), k, k, ())[0] is None
