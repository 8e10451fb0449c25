"""The Metal kernels, run by the shim in both orders of its fibers: every variant against the float64 oracle,
switches against each other, and defects that must show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyflash.backends.metal import backward, capabilities, forward, render, runtime
from polyflash.backends.metal.configs import BackwardConfig, DecodeConfig, ForwardConfig
from polyflash.backends.metal.uniforms import channels_of
from polyflash.errors import SpecError
from polyflash.plan import Launch
from polyflash.quant import NAMED, QuantizedTensor, Scheme, quantize
from polyflash.quant.calls import opened
from polyflash.reference import attention_reference
from polyflash.spec import Arguments, AttentionSpec, Phase
from polyflash.target import parse
from tests.backends.metal import shim

pytestmark = pytest.mark.skipif(not shim.compiler(), reason=f"no C++ compiler: {', '.join(shim.COMPILERS)}")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALLOWED = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value
TILE = ForwardConfig(16, 16)
GRADIENTS = BackwardConfig(16, 16, 16, 16)
Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def fibers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "compiled", shim.library)
    monkeypatch.setattr(runtime, "_libraries", {})


def launch_of(config: Any, phase: Phase, q: Tensor, k: Tensor, v: Tensor) -> Launch:
    (row,) = (row for row in capabilities.CAPABILITIES if row.phase is phase)
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    spec = AttentionSpec(phase, str(q.dtype).removeprefix("torch."), "mps", *sizes, frozenset())
    return Launch(row, config, "explicit", parse("metal:m3"), spec)


def attend(config: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse, in memory that holds NaN before."""
    phase = Phase.DECODE if isinstance(config, DecodeConfig) else Phase.FORWARD
    args = Arguments(need_lse=True, **options)
    out = torch.full((*q.shape[:3], channels_of(v, args)), math.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:3], math.nan)
    return forward.run(launch_of(config, phase, q, k, v), q, k, v, out, lse, args)


def differentiate(config: Any, inputs: Inputs, dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """dq, dk and dv."""
    with shim.running(reversed=shim.order.reversed):  # every barrier of the forward is there
        out, lse = attend(TILE, *inputs, **options)
    launch = launch_of(config, Phase.BACKWARD, *inputs)
    needs = (True, True, True, False, False)
    got = backward.run(launch, dout, None, *inputs, out, lse, Arguments(need_lse=True, **options), needs)
    return tuple(x for x in got if x is not None)


def drawn(
    heads: tuple[int, int] = (4, 2),
    rows: int = 21,
    keys: int = 43,
    dims: tuple[int, int] = (24, 24),
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    generator = torch.Generator().manual_seed(rows * keys)
    shapes = ((2, heads[0], rows, dims[0]), (2, heads[1], keys, dims[0]), (2, heads[1], keys, dims[1]))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def off(got: tuple[Tensor, Tensor], inputs: Inputs, **options: Any) -> float:
    """The largest error of out and lse, of the largest value; empty rows must be exact."""
    given = {n: x for n, x in options.items() if not n.startswith("window_")}
    if "window_left" in options or "window_right" in options:
        given["window"] = options.get("window_left"), options.get("window_right")
    want = attention_reference(*inputs, **given)
    empty = want.lse == -math.inf
    if not torch.equal(got[1] == -math.inf, empty) or bool((got[0][empty] != 0).any()):
        return math.inf
    apart = (got[0].double() - want.out).abs().max() / want.out.abs().max()
    lse = (got[1].double() - want.lse)[~empty].abs().max()
    return float(torch.maximum(apart, lse).nan_to_num(math.inf))


def gradient_off(got: tuple[Tensor, ...], inputs: Inputs, dout: Tensor, **options: Any) -> float:
    exact = [x.double().requires_grad_() for x in inputs]
    out = attention_reference(*exact, **options).out
    want = torch.autograd.grad(out, exact, dout.double())
    errors = ((a.double() - b).abs().max() / b.abs().max() for a, b in zip(got, want, strict=True))
    return float(torch.stack(tuple(errors)).max().nan_to_num(math.inf))


def bias_gradient_off(config: Any, inputs: Inputs, dout: Tensor, bias: Tensor, **options: Any) -> float:
    """The largest error of a bias gradient, of its largest value."""
    sinks = torch.tensor((0.5, -1.0, 2.0, 1.0))  # what is added to a whole row counts beside them
    options = {"causal": True, "softcap": 3.0, "sinks": sinks, **DROP, **options}
    with shim.running(reversed=shim.order.reversed):
        out, lse = attend(TILE, *inputs, bias=bias, **options)
    launch = launch_of(config, Phase.BACKWARD, *inputs)
    args = Arguments(need_lse=True, bias=bias, **options)
    got = backward.run(launch, dout, None, *inputs, out, lse, args, (False, False, False, True, False))[3]
    exact = bias.double().requires_grad_()
    right = attention_reference(*(x.double() for x in inputs), bias=exact, **options).out
    (want,) = torch.autograd.grad(right, exact, dout.double())
    assert got is not None and got.shape == bias.shape and got.dtype is bias.dtype
    return float(((got.double() - want).abs().max() / want.abs().max()).nan_to_num(math.inf))


DROP: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": torch.tensor(-(1 << 45) + 77)}
PLACES: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "window_left": 9},
    {"window_right": 3, **DROP},
)
VARIANTS = {
    "plain": TILE,
    "two stages": ForwardConfig(16, 16, stages=2),
    "parts": ForwardConfig(16, 32, split_exp=4),
    "base e": ForwardConfig(16, 16, base2=False),
    "no skipping": ForwardConfig(16, 16, skip=False),
    "packed": ForwardConfig(16, 16, pack_gqa=True),
    "one simdgroup": ForwardConfig(8, 8),
    "large": ForwardConfig(32, 64),
    "splits": DecodeConfig(8, 16, 16),
    "splits, two stages": DecodeConfig(16, 8, 16, stages=2),
}


@pytest.mark.parametrize("reversed", (False, True), ids=("forward", "reverse"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str, reversed: bool):
    for number, options in enumerate(PLACES):
        dtype = DTYPES[(number + list(VARIANTS).index(variant)) % 3] if variant == "plain" else torch.float32
        inputs = drawn(dtype=dtype, rows=43 if number == 2 else 21)
        with shim.running(reversed=reversed):
            got = attend(VARIANTS[variant], *inputs, **options)
        assert off(got, inputs, **options) <= ALLOWED[dtype], f"{options}"


def test_switches_change_no_bit():
    """A row's sums have one order, whether tiles are read ahead, the exponential is cut up, or hidden blocks
    are walked over; base e rounds otherwise."""
    inputs = drawn()
    for options in PLACES:
        base = attend(TILE, *inputs, **options)
        for name in ("two stages", "no skipping", "packed"):
            got = attend(VARIANTS[name], *inputs, **options)
            assert all(torch.equal(a, b) for a, b in zip(got, base, strict=True)), f"{name} {options}"
        half = tuple(x.half() for x in inputs)  # in float32 each part is summed by itself
        whole, parts = (attend(ForwardConfig(16, 32, split_exp=n), *half, **options) for n in (1, 4))
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True)), f"parts {options}"
        again = attend(VARIANTS["base e"], *inputs, **options)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=2e-6) for a, b in zip(again, base, strict=True))


@pytest.mark.parametrize("reversed", (False, True), ids=("forward", "reverse"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype: torch.dtype, reversed: bool):
    for options, skip in itertools.product(({}, {"causal": True, **DROP}), (True, False)):
        inputs = drawn(dims=(24, 17), dtype=dtype)
        dout = torch.randn(2, 4, 21, 17, generator=torch.Generator().manual_seed(1)).to(dtype)
        with shim.running(reversed=reversed):
            got = differentiate(BackwardConfig(8, 16, 16, 8, skip=skip), inputs, dout, **options)
        assert gradient_off(got, inputs, dout, **options) <= 3 * ALLOWED[dtype], f"{options} {skip}"


def forward_fault(config: Any) -> Callable[[], float]:
    """The error of a causal call. An infinity of V reaches the rows that see it, and these alone."""

    def fault() -> float:
        q, k, v = drawn(dims=(40, 40))
        odd = v.clone()
        odd[:, :, 28, 5] = math.inf  # row 6 is the first to see it
        out, lse = attend(config, q, k, odd, causal=True)
        if not bool((out[:, :, 6:, 5] == math.inf).all()):
            return math.inf
        plain = attend(config, q, k, v, causal=True)[0]
        out[:, :, 6:, 5] = plain[:, :, 6:, 5]
        return max(off((out, lse), (q, k, v), causal=True), float((out - plain).abs().max().nan_to_num(9.0)))

    return fault


def gradient_fault() -> float:
    """The error of gradients. What is infinite where no row sees it changes none of them: a masked row of dO,
    and a key whose scores are -inf."""
    q, k, v = drawn(rows=43, keys=43)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    q[..., 0] = -q[..., 0].abs() - 0.1
    seen = torch.ones(43, 43, dtype=torch.bool)
    seen[7] = False
    without = seen.clone()
    without[:, 19] = False
    odd_k, odd_dout = k.clone(), dout.clone()
    odd_k[:, :, 19, 0] = odd_dout[:, :, 7] = math.inf
    got = differentiate(GRADIENTS, (q, odd_k, v), odd_dout, mask=seen[None, None])
    plain = differentiate(GRADIENTS, (q, k, v), dout, mask=without[None, None])
    apart = max(float((a - b).abs().max().nan_to_num(math.inf)) for a, b in zip(got, plain, strict=True))
    return max(apart, gradient_off(plain, (q, k, v), dout, mask=without[None, None]))


def bias_fault() -> float:
    """The error of a bias gradient, of tiles that are walked over entries and heads, over rows and over keys.
    What is infinite where no row sees it changes none of them."""
    inputs = drawn(rows=43)
    dout = torch.randn(2, 4, 43, 24, generator=torch.Generator().manual_seed(1))
    generator, worst = torch.Generator().manual_seed(2), 0.0
    for shape in ((43, 43), (2, 1, 1, 43), (4, 43, 1)):
        bias = torch.randn(shape, generator=generator)
        worst = max(worst, bias_gradient_off(GRADIENTS, inputs, dout, bias))
    return worst


TILES = {"one stage": TILE, "two stages": ForwardConfig(16, 16, stages=2)}
FAULTS: dict[str, tuple[Callable[[], float], ...]] = {
    "attend": tuple(map(forward_fault, TILES.values())),
    "differentiate": (gradient_fault,),
    "differentiate_bias": (bias_fault,),
}
# Barriers that the memory model asks for between what lanes of a simdgroup read and what they write next,
# where a product or a reduction of the simdgroup stands too: there lanes meet without a barrier.
BESIDE_A_MEETING = {"attend": {10}, "differentiate": {8, 13}, "differentiate_bias": {8}}
NOT_CALLED = {
    "attend": set[int](),
    "differentiate": {0, 1, 2},
    "differentiate_bias": set(range(5)),
}  # of rescale, store_tile


@pytest.mark.parametrize("kernel", FAULTS)
def test_every_deleted_barrier_shows(kernel: str):
    text = render.source(kernel, render.Constants("float", "float", "float", 32, 32))
    unseen = set()
    for number in (-1, *range(shim.barriers(text))):
        worst = 0.0
        for fault, reversed in itertools.product(FAULTS[kernel], (False, True)):
            with shim.running(reversed=reversed, deleted=number):
                try:
                    worst = max(worst, fault())
                except RuntimeError:  # some threads wait, and others do not come
                    worst = math.inf
        if worst <= 2e-5:
            unseen.add(number)
    assert unseen == {-1} | BESIDE_A_MEETING[kernel] | NOT_CALLED[kernel]


DEFECTS = {
    "mask off by one": ("scores", "place.position + n.right + 1", "place.position + n.right"),
    "window off by one": ("scores", "place.position - n.left", "place.position - n.left + 1"),
    "sums not scaled": ("forward", "if (simd_any(alpha != 1.0f)) rescale", "if (false) rescale"),
    "last block not visited": ("scores", "(end + SIZE - 1) / SIZE", "end / SIZE"),
    "kv head of the first": ("forward", "i_group.y * n.pack / n.group", "0 * i_group.y"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_shows(defect: str, monkeypatch: pytest.MonkeyPatch):
    name, old, new = DEFECTS[defect]
    text_of = render.kernel_text
    assert text_of(name).count(old) == 1
    monkeypatch.setattr(
        render, "kernel_text", lambda n: text_of(n).replace(old, new) if n == name else text_of(n)
    )
    inputs, options = drawn(), {"causal": True, "window_left": 9}
    assert off(attend(TILE, *inputs, **options), inputs, **options) > 1e-2


def test_lanes_that_part_are_found(monkeypatch: pytest.MonkeyPatch):
    """A product of matrices that only some lanes come to."""
    text_of = render.kernel_text
    old, new = "row_max(top), m_i", "(lane < 7 ? row_max(top) : simd_max(top)), m_i"
    monkeypatch.setattr(render, "kernel_text", lambda n: text_of(n).replace(old, new))
    with pytest.raises(RuntimeError, match=r"meet for different things|wait for each other"):
        attend(TILE, *drawn())


def test_a_config_that_does_not_fit_is_refused_before_a_launch():
    with pytest.raises(SpecError, match=r"config: got .* of \d+ bytes, wanted tiles that fit 32768 bytes"):
        attend(ForwardConfig(64, 64, stages=2), *drawn(dims=(128, 128)))


LENS, STARTS = torch.tensor((43, 17), dtype=torch.int32), torch.tensor((0, 5), dtype=torch.int32)
OPERANDS: dict[str, dict[str, Any]] = {
    "lens": {"kv_lens": LENS, "kv_starts": STARTS, "causal": True},
    "offset": {"q_offset": torch.tensor((3, 30), dtype=torch.int32), "causal": True, "softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor((0.1, 0.2, -0.3, 0.4))},
    "mask": {"mask": torch.rand(2, 1, 21, 43, generator=torch.Generator().manual_seed(2)) < 0.7},
    "bias": {"bias": torch.randn(4, 21, 43, generator=torch.Generator().manual_seed(3))},
}


@pytest.mark.parametrize("reversed", (False, True), ids=("forward", "reverse"))
@pytest.mark.parametrize("name", OPERANDS)
def test_operands(name: str, reversed: bool):
    """Of a forward, a decode and a backward call."""
    inputs, options = drawn(), OPERANDS[name]
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    with shim.running(reversed=reversed):
        for config in (TILE, DecodeConfig(8, 16, 16)):
            assert off(attend(config, *inputs, **options), inputs, **options) <= 3e-6
        got = differentiate(GRADIENTS, inputs, dout, **options)
        assert gradient_off(got, inputs, dout, **options) <= 1e-5


@pytest.mark.parametrize("reversed", (False, True), ids=("forward", "reverse"))
def test_bias_gradients(reversed: bool):
    inputs = drawn(dims=(24, 17))
    dout = torch.randn(2, 4, 21, 17, generator=torch.Generator().manual_seed(1))
    with shim.running(reversed=reversed):
        for shape in ((2, 4, 21, 43), (21, 43), (4, 21, 1), (2, 1, 1, 43), (1, 1)):
            bias = torch.randn(shape, generator=torch.Generator().manual_seed(3))
            assert bias_gradient_off(BackwardConfig(8, 16, 16, 8), inputs, dout, bias) <= 2e-5, shape


IDS = (
    torch.tensor(((0,) * 9 + (1,) * 12, (2,) * 21)),
    torch.tensor(((0,) * 20 + (1,) * 23, (1,) * 7 + (2,) * 36)),
)


@pytest.mark.parametrize("reversed", (False, True), ids=("forward", "reverse"))
def test_segments_and_packed_members(reversed: bool):
    inputs = drawn()
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    ids = dict(zip(("q_segments", "k_segments"), (x.int() for x in IDS), strict=True))
    seen = ids["q_segments"][:, None, :, None] == ids["k_segments"][:, None, None, :]
    with shim.running(reversed=reversed):
        for config in (TILE, ForwardConfig(16, 16, pack_gqa=True), DecodeConfig(8, 16, 16)):
            assert off(attend(config, *inputs, **ids), inputs, mask=seen) <= 3e-6
        got = differentiate(GRADIENTS, inputs, dout, **ids)
        assert gradient_off(got, inputs, dout, mask=seen) <= 1e-5
        check_packed(tuple(x[:1] for x in inputs), dout[:1])


def check_packed(inputs: Inputs, dout: Tensor) -> None:
    """Packed members, one of them without rows and one without keys, and rows and keys behind the last."""
    cu_q, cu_k = torch.tensor((0, 9, 9, 14, 19)).int(), torch.tensor((0, 17, 30, 30, 41)).int()
    members = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    for config in (TILE, ForwardConfig(8, 16, pack_gqa=True)):
        out, lse = attend(config, *inputs, **members)
        for b in range(4):
            rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
            if b == 2:
                assert bool((out[:, :, rows] == 0).all()) and bool((lse[:, :, rows] == -math.inf).all())
            elif b != 1:
                own = tuple(x[:, :, s] for x, s in zip(inputs, (rows, keys, keys), strict=True))
                assert off((out[:, :, rows], lse[:, :, rows]), own, causal=True) <= 3e-6
        assert bool((out[:, :, 19:] == 0).all()) and bool((lse[:, :, 19:] == -math.inf).all())
    got = differentiate(GRADIENTS, inputs, dout, **members)
    for b in (0, 3):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        own = tuple(x[:, :, s] for x, s in zip(inputs, (rows, keys, keys), strict=True))
        parts = tuple(x[:, :, s] for x, s in zip(got, (rows, keys, keys), strict=True))
        assert gradient_off(parts, own, dout[:, :, rows], causal=True) <= 1e-5
    assert all(
        bool((x[:, :, s] == 0).all()) for x, s in zip(got, (slice(19, 21), *[slice(41, 43)] * 2), strict=True)
    )


PAIRS = {
    "int8-smooth": NAMED["int8-smooth"],
    "int4": (NAMED["int4"][0], Scheme(dtype="int4", channels=6, symmetric=False)),
    "int8-block": (Scheme(granularity="block", tokens=7, channels=9), Scheme(granularity="head")),
    "int4-k": (Scheme(dtype="int4"), None),
}


@pytest.mark.parametrize("reversed", (False, True), ids=("forward", "reverse"))
@pytest.mark.parametrize("name", PAIRS)
def test_codes(name: str, reversed: bool):
    """Level A: attention over the values of the codes, whether 4 channels are one load or not."""
    for dims in ((24, 32), (26, 18)):
        q, *kv = drawn(dims=dims)
        coded = [x if s is None else quantize(x, s) for x, s in zip(kv, PAIRS[name], strict=True)]
        call = opened(q, *coded, Arguments(causal=True, backend="metal"), "metal:m3")
        assert call.args.codes
        tables = {n: getattr(call.args, n) for n in ("codes", "k_scale", "k_shift", "v_scale", "v_shift")}
        exact = q, *(x.values(torch.float64).float() if isinstance(x, QuantizedTensor) else x for x in coded)
        with shim.running(reversed=reversed):
            for config in (TILE, DecodeConfig(8, 16, 16)):
                got = attend(config, q, call.k, call.v, causal=True, **tables)
                assert off(got, exact, causal=True) <= 4e-6


@pytest.mark.parametrize("reversed", (False, True), ids=("forward", "reverse"))
def test_pages(reversed: bool):
    """Keys in pages of 7 in another order, of values and of codes."""
    q, k, v = drawn(keys=42)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    table, lens = order.view(2, 6).int(), torch.tensor((40, 13)).int()
    table[1, 2:] = 1 << 20  # beyond its keys: read by nobody
    pools = []
    for x in (k, v):
        pool = torch.full((12, 2, 7, 24), math.nan)
        pool[order] = x.unflatten(2, (6, 7)).transpose(1, 2).flatten(0, 1)
        pools.append(pool)
    dense = [quantize(x, Scheme()) for x in (k, v)]
    coded = [quantize(pool, Scheme()) for pool in pools]
    tables = {"codes": "int8/1x0,int8/1x0", "k_scale": coded[0].scale, "v_scale": coded[1].scale}
    values = tuple(x.values(torch.float64).float() for x in dense)
    given: dict[str, Any] = {"page_table": table, "kv_lens": lens, "causal": True}
    with shim.running(reversed=reversed):
        for config in (TILE, DecodeConfig(8, 16, 16)):
            got = attend(config, q, *pools, **given)
            assert off(got, (q, k, v), kv_lens=lens, causal=True) <= 3e-6
            got = attend(config, q, coded[0].codes, coded[1].codes, **given, **tables)
            assert off(got, (q, *values), kv_lens=lens, causal=True) <= 3e-6


def test_sinks_join_after_splits():
    inputs, sinks = drawn(), torch.tensor((0.5, -1.0, 2.0, 9.0))
    for config in (TILE, DecodeConfig(8, 16, 16)):
        assert off(attend(config, *inputs, sinks=sinks), inputs, sinks=sinks) <= 3e-6


def test_results_and_gradients_of_any_strides():
    """Views of larger tensors: nothing beside them is read or written."""
    q, k, v = (torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 5), math.nan) for x in drawn())
    inputs = tuple(x[:, :, 1:-2, 2:-3].copy_(y) for x, y in zip((q, k, v), drawn(), strict=True))
    got = attend(TILE, *inputs, causal=True)
    assert off(got, drawn(), causal=True) <= 3e-6
    assert all(torch.equal(a, b) for a, b in zip(got, attend(TILE, *drawn(), causal=True), strict=True))
