"""What a Triton route remembers between calls: kernels are started that Triton itself would have chosen, and
lengths, seeds and values compile nothing. The driver is a stand-in; no kernel runs."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from polyflash import env
from polyflash.backends.gpu.numbers import Numbers
from polyflash.backends.gpu.views import Rows, View, view_of
from polyflash.backends.triton.constants import Constants
from polyflash.workloads import Workload, make
from tests import device
from tests.conformance.rows import ints, qkv

if not env.TRITON_INTERPRET.is_set() and device.DEVICE.type == "cpu":
    pytest.skip("needs Triton's interpreter or a GPU", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from polyflash.backends.triton import forward, merge, runtime
from polyflash.backends.triton.configs import DecodeConfig, ForwardConfig
from tests.backends.triton.direct import Config, launch_of, operands

FORWARD = ForwardConfig(16, 32, 4, 2)
DESCRIPTOR = ForwardConfig(16, 32, 4, 2, loads="descriptor")
DECODE = DecodeConfig(16, 32, 4, 2, 64, fixed_splits=True)
STREAM = 1234


class Driver:
    """In place of a kernel: notes what is compiled and started, each as Triton specialises its arguments."""

    def __init__(self, kernel: Any) -> None:
        self.jit = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn)
        self.arg_names = self.jit.arg_names
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.binder = create_function_from_signature(self.jit.signature, self.jit.params, backend)
        self.compiled: list[Any] = []
        self.started: list[dict[str, Any]] = []

    def specialised(self, arguments: tuple[Any, ...]) -> str:
        return str(self.binder(*arguments, debug=False, instrumentation_mode="")[1])

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        spec, src = self.specialised(arguments), SimpleNamespace(signature={})
        self.compiled.append(spec)
        self.forms = [(type(x), len(x)) for x in arguments[:2]]
        run = partial(self.start, spec, arguments[2])
        return SimpleNamespace(run=run, function="function", packed_metadata="packed", src=src)

    def start(self, spec: str, c: Any, *launched: Any) -> None:
        grid, after, rest = launched[:3], launched[3:9], launched[9:]
        (t_kind, t_size), (n_kind, n_size) = self.forms
        t, n, boxes = rest[:t_size], rest[t_size:][:n_size], rest[t_size + n_size :]
        t, n = t_kind._make(t), n_kind._make(n)
        assert after == (STREAM, "function", "packed", None, None, None)
        assert self.specialised((t, runtime.unknown(n), c, *boxes)) == spec, (
            "another kernel than Triton would start"
        )
        compiled_in = {name: x.value for name, x in c._asdict().items()}
        self.started.append({**t._asdict(), **n._asdict(), **compiled_in, "programs": grid})


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(attend=Driver(forward.attend), merge=Driver(merge.merge_splits))
    monkeypatch.setattr(forward, "attend", found.attend)
    monkeypatch.setattr(merge, "merge_splits", found.merge)
    monkeypatch.setattr(runtime, "INTERPRET", False)
    monkeypatch.setattr(runtime, "_DIRECT", True)
    monkeypatch.setattr(runtime, "hooked", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    return found


class Route:
    """Calls of one route, one after the other."""

    def __init__(self, config: Config) -> None:
        self.launch = launch_of(config, name="cuda:sm90")
        self.run = forward.run

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        q, k, v, args = operands(q, k, v, options)
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3])
        self.run(self.launch, q, k, v, out, lse, args)

    @property
    def ready(self) -> int:
        return len(self.launch.prepared.ready)


@pytest.mark.parametrize(
    "config", (FORWARD, DESCRIPTOR, DECODE), ids=lambda c: f"{type(c).__name__}-{c.loads}"
)
class TestOfARoute:
    def test_equal_calls_share_everything(self, config: Config, drivers: SimpleNamespace):
        route = Route(config)
        for seed in range(5):
            route(*qkv(2, (4, 2), 3, 150, 32, seed=seed), causal=True)
        assert (route.ready, len(drivers.attend.compiled), len(drivers.attend.started)) == (1, 1, 5)
        merges = 5 if config is DECODE else 0
        assert len(drivers.merge.started) == merges and len(drivers.merge.compiled) == bool(merges)

    def test_other_strides_and_numbers_do_not(self, config: Config, drivers: SimpleNamespace):
        route = Route(config)
        q, k, v = qkv(2, (4, 2), 3, 150, 32)
        turned = q.transpose(1, 2).contiguous().transpose(1, 2)
        odd = torch.zeros(2, 4, 3, 33)[..., :32]
        for place, (rows, options) in enumerate((
            *((q, {}), (turned, {}), (odd, {}), (q, {"window": (9, None)}), (q, {"window": (10, None)})),
            *((q, {"scale": -0.5}), (q, {"scale": 0.25}), (q, {"softcap": 3.0}), (q, {"q_offset": 4})),
        )):  # fmt: skip
            route(rows, k, v, causal=True, **options)
            assert route.ready == place + 1
            route(rows, k, v, causal=True, **options)
            assert route.ready == place + 1
        kinds = (
            6  # plain, odd strides, a window, a negative scale, softcap, an offset; multiples of 16 are alike
        )
        assert len(drivers.attend.compiled) == kinds
        started = drivers.attend.started
        assert [s["left"] for s in started[6:10]] == [9, 9, 10, 10]
        assert [s["NEGATIVE"] for s in started[10:14]] == [True, True, False, False]

    def test_a_growing_cache_compiles_nothing(self, config: Config, drivers: SimpleNamespace):
        """Keys of one buffer, ever more of them, beside lengths in a tensor."""
        q, k, v = qkv(2, (4, 2), 1, 1100, 32)
        route = Route(config)
        for n in (*range(130, 150), 256, 512, 1000, 1100):
            route(q, k[:, :, :n], v[:, :, :n], kv_lens=ints(n, n - 1))
        assert len(drivers.attend.compiled) == 1 and len(drivers.merge.compiled) <= 1
        assert [s["seqlen_k"] for s in drivers.attend.started[-2:]] == [1000, 1100]
        programs = {s["programs"][0] for s in drivers.attend.started}
        assert len(programs) > 1 if config is DECODE else len(programs) == 1

    def test_a_cache_that_is_copied_as_it_grows_compiles_nothing(
        self, config: Config, drivers: SimpleNamespace
    ):
        """What torch.cat makes: other strides at every step."""
        route = Route(config)
        for n in range(130, 150):
            route(*qkv(2, (4, 2), 1, n, 32))
        assert route.ready == 20 and len(drivers.attend.compiled) == 1

    def test_batches_and_lengths_compile_nothing(self, config: Config, drivers: SimpleNamespace):
        """Of tensors with the strides of one buffer: 1, multiples of 16 and others alike."""
        q, k, v = qkv(33, (4, 2), 32, 300, 32)
        route = Route(config)
        for batch, rows, keys in ((1, 1, 1), (2, 3, 130), (16, 16, 160), (17, 5, 299), (33, 32, 300)):
            route(q[:batch, :, :rows], k[:batch, :, :keys], v[:batch, :, :keys])
        strides = {(s["out"][1:], s["lse"][1:]) for s in drivers.attend.started}
        assert len(drivers.attend.compiled) <= len(strides)

    def test_tokens_over_growing_pages_compile_little(self, config: Config, drivers: SimpleNamespace):
        """A table as wide as the longest request, over one pool."""
        w = Workload("", frozenset(), 2, 4, 2, 1, 300, 32, kv_lens=(300, 40), page_size=16)
        q, k, v, options = make(w)
        route = Route(config)
        for columns in range(5, 20):
            table = options["page_table"].repeat(1, 2)[:, :columns].contiguous()
            route(q, k, v, page_table=table, kv_lens=options["kv_lens"].clamp(max=16 * columns))
        kinds = {columns % 16 == 0 for columns in range(5, 20)}
        assert len({str(spec) for spec in drivers.attend.compiled}) <= len(kinds)

    def test_no_rows_start_nothing(self, config: Config, drivers: SimpleNamespace):
        Route(config)(*qkv(2, (4, 2), 0, 150, 32))
        assert not drivers.attend.started


def test_only_a_hook_closes_the_direct_way():
    """Profilers hang themselves into `kernel[grid]`, which the direct way leaves out."""
    assert not runtime.hooked()
    chain = triton.knobs.runtime.launch_enter_hook

    def hook(_: Any) -> None: ...

    chain.add(hook)
    try:
        assert runtime.hooked()
    finally:
        chain.remove(hook)
    assert not runtime.hooked()


def test_seeds_differ_from_call_to_call(drivers: SimpleNamespace):
    route, seeds = Route(FORWARD), (5, 2**31 + 6, -1, 2**40 + 7)
    q, k, v = qkv(1, 2, 20, 40, 32)
    for seed in seeds:
        route(q, k, v, dropout_p=0.5, dropout_seed=seed)
    words = [(s["seed_lo"] & 0xFFFFFFFF, s["seed_hi"] & 0xFFFFFFFF) for s in drivers.attend.started]
    assert words == [(seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF) for seed in seeds]
    assert (route.ready, len(drivers.attend.compiled)) == (1, 1)


@pytest.mark.parametrize(
    "config", (FORWARD, DESCRIPTOR, DECODE), ids=lambda c: f"{type(c).__name__}-{c.loads}"
)
def test_a_remembered_kernel_is_the_one_that_triton_would_start(config: Config, drivers: SimpleNamespace):
    """Addresses that are multiples of 16 bytes and others, strides of every kind; `Driver.start` compares."""
    routes: dict[Any, Route] = {}
    for shift in (0, 1, 4, 0, 1):
        for dim in (16, 33):
            buffer = torch.zeros(3, 2 * 2 * 40 * 48)
            q, k, v = (
                x[shift:].as_strided((2, heads, rows, dim), (heads * rows * 48, rows * 48, 48, 1))
                for x, heads, rows in zip(buffer, (2, 1, 1), (3, 40, 40), strict=True)
            )
            for name, x in (
                *((None, None), ("kv_lens", ints(0, 30, 40)[shift % 2 :][:2])),
                *(
                    ("bias", torch.zeros(4 * 41)[shift:].as_strided((3, 40), (41, 1))),
                    ("bias", torch.zeros(40)),
                ),
                ("sinks", torch.zeros(9)[shift:][:2]),
            ):
                route = routes.setdefault((dim, name), Route(config))
                route(q, k, v, **({} if name is None else {name: x}))
                route(
                    q[:1], k[:1], v[:1], **({} if name is None else {name: x[:1] if name == "kv_lens" else x})
                )
    assert len(drivers.attend.started) == 2 * 5 * 2 * 5


def test_threads_that_load_one_kernel_start_all_of_it(monkeypatch: pytest.MonkeyPatch):
    """Triton sets a kernel's launcher before it has loaded the function."""
    started = []

    class Compiled:
        packed_metadata, function, _run = "packed", None, None
        src = SimpleNamespace(signature={})

        @property
        def run(self) -> Any:
            if self._run is None:
                self._run = lambda *launched: started.append(launched[4])
                time.sleep(0.05)
                self.function = "function"
            return self._run

    compiled = Compiled()
    kernel = SimpleNamespace(warmup=lambda *_, grid: compiled)
    monkeypatch.setattr(runtime, "INTERPRET", False)
    monkeypatch.setattr(runtime, "_DIRECT", True)
    monkeypatch.setattr(runtime, "hooked", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    device_0, c = torch.device("cuda", 0), runtime.compiled_in(Constants())
    with ThreadPoolExecutor(4) as threads:  # each of a route of its own
        for _ in range(4):
            threads.submit(runtime.Kernels().launch, kernel, (1,), ((None,), (), c), {}, (), device_0)
    assert started == ["function"] * 4


def test_fields_that_change_places_compile_anew():
    """Triton's cache of compiled kernels, which outlives a process, does not know their names."""
    c = runtime.compiled_in(Constants(D=128))
    said = []
    kernel = SimpleNamespace(
        warmup=lambda t, n, c, **_: (
            said.append(c.LAYOUT.value) or SimpleNamespace(src=SimpleNamespace(signature={}))
        )
    )
    here, there = NamedTuple("T", [("a", Any), ("b", Any)]), NamedTuple("T", [("b", Any), ("a", Any)])
    for t in (here(1, 2), here(3, 4), there(1, 2), here(1, here(1, 2)), here(1, there(1, 2))):
        runtime.compile(kernel, (t, Numbers(1, 2, 3), c), {})
    assert said[0] == said[1] and len(set(said)) == 4


def test_distances_between_rows_are_compiled_in():
    """Triton itself sees whether 16 divides them, and loads rows of 40 elements one by one."""
    c, tensors = runtime.compiled_in(Constants()), NamedTuple("T", [("q", Any), ("k", Any), ("lse", Any)])
    for strides, wanted in (
        ((320, 40, 320), 8), ((320, 80, 1280), 1), ((0, 0, 12), 4), ((24, 24, 0), 8), ((7, 14, 28), 1)
    ):  # fmt: skip
        t = tensors(View(None, 320, 40, 8, 1), View(None, *strides, 1), Rows(None, 3, 3, 1))
        found = runtime.spaced(c, t._replace(q=None)).ALIGNED.value
        assert found == wanted, strides
        assert runtime.spaced(c, t).ALIGNED.value == (wanted if strides != (320, 80, 1280) else 1), strides
        wide = t._replace(q=View(None, 320, 160, 32, 1))  # whose loads stay as wide
        assert runtime.spaced(c, wide).ALIGNED.value == 1
        assert (
            runtime.spaced(c._replace(K_CODES=triton.language.constexpr("int4")), wide).ALIGNED.value
            == wanted
        )
    kinds = [runtime.kind(n) for n in (0, 1, 2, 3, 4, 8, 16, 24, 40, 48, 2**31, 2**40)]
    assert [kind[1] for kind in kinds] == [16, 1, 2, 1, 4, 8, 16, 8, 8, 16, 16, 16]
    assert kinds[1] != kinds[3] and kinds[6] != kinds[10]


@pytest.mark.parametrize("cached", (False, True))
@pytest.mark.parametrize("direct", (False, True))
def test_what_triton_compiled_is_said_once(direct, cached, monkeypatch, capsys, tmp_path):
    """One line with seconds where the log is asked for, and none for what Triton's own cache had."""
    binary = tmp_path / "attend.cubin"

    def compile(*_: Any, **__: Any) -> Any:
        binary.touch()
        if cached:
            os.utime(binary, (1, 1))
        return Compiled()

    class Compiled:
        function, packed_metadata, metadata_group = "function", "", {"attend.cubin": str(binary)}
        src = SimpleNamespace(signature={})

        def run(self, *_: Any) -> None: ...

        def __getitem__(self, grid: Any) -> Any:
            return self.run

    class Kernel:
        __name__, warmup = "attend", staticmethod(compile)

    monkeypatch.setattr(runtime, "INTERPRET", False)
    monkeypatch.setattr(runtime, "_DIRECT", direct)
    monkeypatch.setattr(runtime, "hooked", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: torch.no_grad())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(runtime.target, "detect", lambda *_: SimpleNamespace(name="cuda:sm90"))
    monkeypatch.setenv("POLYFLASH_LOG", "1")
    kernels, q = runtime.Kernels(), view_of(torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16))
    c = runtime.compiled_in(Constants(D=128, HAS_RIGHT=True))
    for _ in range(3):
        kernels.launch(Kernel(), (1,), ((q,), (), c), {}, ("key",), torch.device("cuda", 0))
    line = r"polyflash: compiled attend bfloat16 d128 causal for cuda:sm90 in \d+\.\d s\n"
    said = capsys.readouterr().err
    assert said == "" if cached else re.fullmatch(line, said)
