"""torch's SDPA on polyflash: the same results for every argument torch takes, the same errors for others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyflash import UnsupportedError, use_backend
from polyflash.integrations import sdpa
from tests import processes
from tests.device import DEVICE, ON_A_CPU, generator
from tests.rows_here import FREE, HERE, needs_engine
from tests.tolerance import BACKSTOP, GRADIENT_BACKSTOP, near

TORCH = F.scaled_dot_product_attention
INF = float("inf")
NAN = float("nan")


@pytest.fixture(autouse=True)
def on_any_machine() -> Any:
    """Without a CPU engine calls are torch's own, unless polyflash's torch row is asked for by name."""
    with use_backend(None if FREE != "torch" else "torch"):
        yield


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def seen(*shape: int) -> Tensor:
    """A bool mask whose first row sees nothing and whose others see the first key."""
    mask = torch.rand(*shape) > 0.4
    mask[..., 0] = True
    mask[..., :1, :] = False
    return mask


def hiding(*shape: int) -> Tensor:
    return torch.randn(*shape).masked_fill(~seen(*shape), -INF)


Case = Callable[[], tuple[tuple[Tensor, ...], dict[str, Any]]]
CASES: dict[str, Case] = {
    "plain": lambda: ((x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8)), {}),
    "head_dim_v": lambda: ((x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 3)), {}),
    "causal, fewer rows": lambda: ((x(2, 4, 5, 8), x(2, 4, 9, 8), x(2, 4, 9, 8)), {"is_causal": True}),
    "causal, more rows": lambda: ((x(2, 4, 9, 8), x(2, 4, 5, 8), x(2, 4, 5, 8)), {"is_causal": True}),
    "one key/value head": lambda: ((x(2, 4, 5, 8), x(2, 1, 6, 8), x(2, 1, 6, 8)), {}),
    "one key head": lambda: ((x(2, 4, 5, 8), x(2, 1, 6, 8), x(2, 4, 6, 8)), {}),
    "heads of value alone": lambda: ((x(2, 1, 5, 8), x(2, 1, 6, 8), x(2, 4, 6, 8)), {}),
    "one query head": lambda: ((x(2, 1, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8)), {}),
    "one key/value batch": lambda: ((x(3, 4, 5, 8), x(1, 4, 6, 8), x(1, 4, 6, 8)), {}),
    "one query batch": lambda: ((x(1, 4, 5, 8), x(3, 4, 6, 8), x(3, 4, 6, 8)), {}),
    "grouped": lambda: ((x(2, 6, 5, 8), x(2, 2, 7, 8), x(2, 2, 7, 8)), {"enable_gqa": True}),
    "grouped, causal": lambda: (
        (x(2, 4, 5, 8), x(2, 2, 7, 8), x(2, 2, 7, 8)),
        {"enable_gqa": True, "is_causal": True},
    ),
    "grouped, one batch": lambda: ((x(2, 4, 5, 8), x(1, 2, 7, 8), x(1, 2, 7, 8)), {"enable_gqa": True}),
    "grouped, three dimensions": lambda: ((x(4, 5, 8), x(2, 6, 8), x(2, 6, 8)), {"enable_gqa": True}),
    "grouped, five dimensions": lambda: (
        (x(3, 2, 4, 5, 8), x(3, 2, 2, 6, 8), x(3, 2, 2, 6, 8)),
        {"enable_gqa": True},
    ),
    "grouped, masked": lambda: (
        (x(2, 4, 5, 8), x(2, 2, 7, 8), x(2, 2, 7, 8), seen(2, 1, 5, 7)),
        {"enable_gqa": True},
    ),
    "two dimensions": lambda: ((x(5, 8), x(6, 8), x(6, 3)), {}),
    "two dimensions, causal": lambda: ((x(5, 8), x(6, 8), x(6, 8)), {"is_causal": True}),
    "two dimensions, masked": lambda: ((x(5, 8), x(6, 8), x(6, 8), hiding(5, 6)), {}),
    "three dimensions": lambda: ((x(4, 5, 8), x(4, 6, 8), x(4, 6, 8)), {}),
    "three dimensions, one head": lambda: ((x(4, 5, 8), x(1, 6, 8), x(1, 6, 8)), {}),
    "three dimensions, masked": lambda: ((x(4, 5, 8), x(4, 6, 8), x(4, 6, 8), seen(4, 5, 6)), {}),
    "five dimensions": lambda: ((x(3, 2, 4, 5, 8), x(3, 2, 4, 6, 8), x(3, 2, 4, 6, 8)), {}),
    "five dimensions, broadcast": lambda: ((x(3, 2, 4, 5, 8), x(1, 2, 4, 6, 8), x(3, 1, 1, 6, 8)), {}),
    "five dimensions, mask of five": lambda: (
        (x(3, 2, 4, 5, 8), x(3, 2, 4, 6, 8), x(3, 2, 4, 6, 8), seen(3, 1, 1, 5, 6)),
        {},
    ),
    "five dimensions, mask of four": lambda: (
        (x(3, 2, 4, 5, 8), x(3, 2, 4, 6, 8), x(3, 2, 4, 6, 8), hiding(2, 1, 5, 6)),
        {},
    ),
    "five dimensions, one mask": lambda: (
        (x(3, 2, 4, 5, 8), x(3, 2, 4, 6, 8), x(3, 2, 4, 6, 8), seen(1, 1, 4, 5, 6)),
        {},
    ),
    "six dimensions": lambda: ((x(2, 1, 3, 2, 5, 8), x(2, 2, 1, 2, 6, 8), x(2, 2, 3, 2, 6, 8)), {}),
    "mixed dimensions": lambda: ((x(2, 4, 5, 8), x(6, 8), x(4, 6, 8)), {}),
    "mixed dimensions, few of query": lambda: ((x(5, 8), x(2, 3, 6, 8), x(2, 3, 6, 8)), {}),
    "bool mask": lambda: ((x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), seen(2, 4, 5, 6)), {}),
    "bool mask, two dimensions": lambda: ((x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), seen(5, 6)), {}),
    "bool mask, one row": lambda: (
        (x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), torch.arange(6)[None] < 4),
        {},
    ),
    "bool mask, one key": lambda: (
        (x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), torch.arange(5)[:, None] < 4),
        {},
    ),
    "nothing seen": lambda: (
        (x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), torch.zeros(5, 6, dtype=torch.bool)),
        {},
    ),
    "nothing seen, added": lambda: (
        (x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), torch.full((5, 6), -INF)),
        {},
    ),
    "float mask": lambda: ((x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), hiding(2, 1, 5, 6)), {}),
    "float mask, three dimensions": lambda: (
        (x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), hiding(4, 5, 6)),
        {},
    ),
    "scale": lambda: ((x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8)), {"scale": 0.9}),
    "scale, an int": lambda: ((x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8)), {"scale": 1}),
    "scale 0": lambda: ((x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8)), {"scale": 0.0}),
    "scale -1": lambda: ((x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8)), {"scale": -1.0}),
    "transposed": lambda: (tuple(x(2, 5, 4, 8).transpose(1, 2) for _ in range(3)), {}),
    "strided": lambda: ((x(2, 4, 8, 5).mT, x(2, 4, 6, 16)[..., ::2], x(2, 4, 12, 8)[:, :, ::2]), {}),
    "no keys": lambda: ((x(2, 4, 5, 8), x(2, 4, 0, 8), x(2, 4, 0, 8)), {}),
    "no rows": lambda: ((x(2, 4, 0, 8), x(2, 4, 6, 8), x(2, 4, 6, 8)), {}),
    "no requests": lambda: ((x(0, 4, 5, 8), x(0, 4, 6, 8), x(0, 4, 6, 8)), {}),
}


def outcome(args: tuple[Tensor, ...], options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """The result and the gradient of every float argument."""
    args = tuple(
        a.detach().to(dtype).requires_grad_() if a.is_floating_point() else a  # `to` keeps strides
        for a in args
    )
    out = F.scaled_dot_product_attention(*args, **options)
    weights = torch.randn(out.shape, generator=generator(1)).to(dtype)
    out.backward(weights)
    return [out.detach(), *(a.grad for a in args if a.requires_grad)]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_torchs(name: str, ran: list[tuple[str, str]]) -> None:
    args, options = CASES[name]()
    right = outcome(args, options, torch.float64)
    assert not ran, "torch's own function was wanted"
    with sdpa.enabled(strict=True):
        got = outcome(args, options, torch.float32)
    for i, (ours, theirs) in enumerate(zip(got, right, strict=True)):
        assert ours.shape == theirs.shape and not ours.isnan().any()
        near(ours, theirs, BACKSTOP[torch.float32] if i == 0 else GRADIENT_BACKSTOP[torch.float32], name)
    if all(a.numel() for a in args):
        assert ran[0] == ("forward", HERE[0]), ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["causal, fewer rows", "grouped, masked", "five dimensions"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    args, options = CASES[name]()
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
    right = outcome(args, options, torch.float64)
    with sdpa.enabled(strict=True):
        got = outcome(args, options, dtype)
    for i, (ours, theirs) in enumerate(zip(got, right, strict=True)):
        assert ours.dtype is dtype
        near(ours, theirs, BACKSTOP[dtype] if i == 0 else 3 * GRADIENT_BACKSTOP[dtype], name)


def test_a_float32_mask_over_bfloat16() -> None:
    q, mask = x(2, 4, 6, 8, dtype=torch.bfloat16), hiding(6, 6)
    want = TORCH(*(q.double(),) * 3, mask.double())
    with sdpa.enabled(strict=True):
        near(F.scaled_dot_product_attention(q, q, q, mask), want, BACKSTOP[torch.bfloat16])


Q = torch.zeros(2, 4, 5, 8)
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one dimension": ((torch.zeros(8), torch.zeros(6, 8), torch.zeros(6, 8)), {}),
    "heads": ((Q, torch.zeros(2, 2, 6, 8), torch.zeros(2, 2, 6, 8)), {}),
    "groups": ((Q, torch.zeros(2, 3, 6, 8), torch.zeros(2, 3, 6, 8)), {"enable_gqa": True}),
    "groups of keys": ((Q[:, :1], Q, Q), {"enable_gqa": True}),
    "groups of two dimensions": ((Q[0, 0],) * 3, {"enable_gqa": True}),
    "batch": ((Q, torch.zeros(3, 4, 6, 8), torch.zeros(3, 4, 6, 8)), {}),
    "head_dim": ((Q, torch.zeros(2, 4, 6, 9), torch.zeros(2, 4, 6, 9)), {}),
    "dtypes": ((Q, Q.double(), Q), {}),
    "dtypes of value": ((Q, Q, Q.bfloat16()), {}),
    "ints": ((Q.int(),) * 3, {}),
    "devices": ((Q, Q.to("meta"), Q), {}),
    "sparse": ((Q.to_sparse(), Q, Q), {}),
    "mask of ints": ((Q, Q, Q, torch.ones(5, 5, dtype=torch.int32)), {}),
    "mask of uint8": ((Q, Q, Q, torch.ones(5, 5, dtype=torch.uint8)), {}),
    "mask of float64": ((Q, Q, Q, torch.ones(5, 5, dtype=torch.float64)), {}),
    "mask of float16": ((Q, Q, Q, torch.ones(5, 5, dtype=torch.float16)), {}),
    "mask of no dimension": ((Q, Q, Q, torch.tensor(True)), {}),
    "mask of one dimension": ((Q, Q, Q, torch.ones(5, dtype=torch.bool)), {}),
    "mask of five dimensions": ((Q, Q, Q, torch.zeros(1, 2, 4, 5, 5)), {}),
    "mask of four for three": ((Q[0], Q[0], Q[0], torch.zeros(1, 4, 5, 5)), {}),
    "mask of other keys": ((Q, Q, Q, torch.zeros(5, 4)), {}),
    "mask of more requests": ((Q[:1], Q[:1], Q[:1], torch.zeros(3, 1, 5, 5)), {}),
    "mask of more heads": ((Q[:, :1], Q[:, :1], Q[:, :1], torch.zeros(1, 3, 5, 5)), {}),
    "mask beside causal": ((Q[0], Q[0], Q[0], torch.zeros(5, 5)), {"is_causal": True}),
    "mask, a list": ((Q, Q, Q, [[True]]), {}),
    "query, a list": (([[0.0]], Q, Q), {}),
    "is_causal, an int": ((Q, Q, Q), {"is_causal": 1}),
    "dropout_p 2": ((Q, Q, Q), {"dropout_p": 2.0}),
    "dropout_p -1": ((Q, Q, Q), {"dropout_p": -1.0}),
    "an unknown argument": ((Q, Q, Q), {"mask": None}),
    "too many": ((Q, Q, Q, None, 0.0, False, 1.0), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_torchs(name: str) -> None:
    args, options = REFUSED[name]
    with pytest.raises(Exception) as want:
        TORCH(*args, **options)
    with sdpa.enabled(), pytest.raises(want.type) as got:
        F.scaled_dot_product_attention(*args, **options)
    assert got.type is want.type and str(got.value) == str(want.value)


TORCHS: dict[str, tuple[Case, str]] = {
    "float64": (lambda: ((x(2, 4, 5, 8, dtype=torch.float64),) * 3, {}), "dtype"),
    "both masks": (lambda: ((x(2, 4, 5, 8),) * 3 + (torch.zeros(5, 5),), {"is_causal": True}), "attn_mask"),
    "dropout_p 1": (lambda: ((x(2, 4, 5, 8),) * 3, {"dropout_p": 1.0}), "dropout_p"),
    "scale, a bool": (lambda: ((x(2, 4, 5, 8),) * 3, {"scale": True}), "scale"),
    "scale, a tensor": (lambda: ((x(2, 4, 5, 8),) * 3, {"scale": torch.tensor(0.5)}), "scale"),
    "scale inf": (lambda: ((x(2, 4, 5, 8),) * 3, {"scale": INF}), "scale"),
    "other heads of value": (
        lambda: ((x(2, 4, 5, 8), x(2, 2, 5, 8), x(2, 4, 5, 8)), {"enable_gqa": True}),
        "shapes",
    ),
    "head_dim 0": (lambda: ((x(2, 4, 5, 0), x(2, 4, 6, 0), x(2, 4, 6, 8)), {}), "shapes"),
    "no heads": (lambda: ((x(2, 0, 5, 8),) * 3, {}), "shapes"),
    "meta": (lambda: ((torch.empty(2, 4, 5, 8, device="meta"),) * 3, {}), "device"),
}


@pytest.mark.parametrize("name", TORCHS)
def test_what_polyflash_does_not_run_is_torchs(name: str, ran: list[tuple[str, str]]) -> None:
    if name == "no heads" and torch.__version__ < "2.12":
        pytest.skip("torch's own function divides by zero there, and ends the process")
    args, options = TORCHS[name][0]()
    want = TORCH(*args, **options)
    with use_backend(None):
        with sdpa.enabled():
            got = F.scaled_dot_product_attention(*args, **options)
        with sdpa.enabled(strict=True), pytest.raises(UnsupportedError, match=TORCHS[name][1]):
            F.scaled_dot_product_attention(*args, **options)
    assert got.device == want.device and got.shape == want.shape and not ran
    assert got.is_meta or torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_nested_tensors_are_torchs() -> None:
    q = torch.nested.nested_tensor([x(3, 2, 8), x(5, 2, 8)], layout=torch.jagged).transpose(1, 2)
    with sdpa.enabled():
        got = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(got.values(), TORCH(q, q, q).values())


def test_the_users_choice_of_torchs_kernels_is_torchs() -> None:
    q = x(1, 2, 5, 8).requires_grad_()
    with sdpa.enabled(), sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, q, q)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        dq.sum().backward()  # polyflash has no second derivatives
    assert torch.equal(out, sdpa_math(q)) and q.grad is not None


def sdpa_math(q: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return TORCH(q, q, q)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_are_torchs() -> None:
    q = x(3, 1, 2, 5, 8)

    def total(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q).square().sum()

    want = torch.func.vmap(torch.func.grad(total))(q)
    with sdpa.enabled():
        got = torch.func.vmap(torch.func.grad(total))(q)
    torch.testing.assert_close(got, want)


def test_autocast_is_torchs() -> None:
    q, k, mask = x(2, 4, 5, 8), x(2, 4, 6, 8, dtype=torch.bfloat16), hiding(5, 6)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        want = TORCH(q, k, k, mask)
        with sdpa.enabled(strict=True):
            got = F.scaled_dot_product_attention(q, k, k, mask)
    assert got.dtype is want.dtype is torch.bfloat16
    exact = TORCH(q.bfloat16().double(), k.double(), k.double(), mask.double())
    near(got, exact, BACKSTOP[torch.bfloat16])


def test_the_context_ends(ran: list[tuple[str, str]]) -> None:
    q = x(1, 2, 5, 8)
    want = TORCH(q, q, q)
    with sdpa.enabled():
        with sdpa.enabled(strict=True):
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
        assert len(ran) == 2
    with pytest.raises(ZeroDivisionError), sdpa.enabled():
        raise ZeroDivisionError
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), want) and len(ran) == 2
    assert F.scaled_dot_product_attention is TORCH
    assert torch.equal(sdpa.scaled_dot_product_attention(q, q, q), got_from(q)) and len(ran) == 4


def got_from(q: Tensor) -> Tensor:
    with sdpa.enabled():
        return F.scaled_dot_product_attention(q, q, q)


def test_other_threads_are_not_touched(ran: list[tuple[str, str]]) -> None:
    q = x(1, 2, 5, 8)
    results: list[Tensor] = []
    with sdpa.enabled():
        thread = threading.Thread(target=lambda: results.append(F.scaled_dot_product_attention(q, q, q)))
        thread.start()
        thread.join()
    assert torch.equal(results[0], TORCH(q, q, q)) and not ran


def test_dropout_is_polyflashs_and_obeys_the_generator() -> None:
    ones = torch.ones(1, 4, 64, 64)
    with sdpa.enabled(strict=True):
        torch.manual_seed(3)
        a = F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.25)
        b = F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.25)
        torch.manual_seed(3)
        assert torch.equal(a, F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.25))
    assert not torch.equal(a, b) and abs(float(a.mean()) - 1) < 0.01
    zero = torch.zeros(1, 1, 1, 64)
    with sdpa.enabled(strict=True):  # weights are 1/64, kept ones 1/48
        kept = F.scaled_dot_product_attention(zero, zero.mT.expand(-1, -1, -1, 64), torch.eye(64)[None, None],
                                              dropout_p=0.25)  # fmt: skip
    values = set((kept * 48).round(decimals=4).unique().tolist())
    assert values == {0.0, 1.0}


class Graphs:
    """A backend of torch.compile that runs the graph as it is and keeps the names of what it calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def has(self, name: str, graph: int = -1) -> bool:
        return any(name in call for call in self.calls[graph])


@pytest.fixture
def graphs() -> Any:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["causal, fewer rows", "bool mask", "five dimensions, broadcast"])
@needs_engine
def test_compiled_within_the_context(name: str, graphs: Graphs, ran: list[tuple[str, str]]) -> None:
    args, options = CASES[name]()
    args = tuple(a.requires_grad_() if a.is_floating_point() else a for a in args)
    compiled = torch.compile(lambda *a: F.scaled_dot_product_attention(*a, **options), backend=graphs,
                             fullgraph=True)  # fmt: skip
    with use_backend(None), sdpa.enabled(strict=True):
        got = compiled(*args)
    assert graphs.has("polyflash.attention") and {"forward"} == {phase for phase, _ in ran}
    want = TORCH(*args, **options)
    near(got.detach(), want.detach(), BACKSTOP[torch.float32])
    gradients = zip(*(torch.autograd.grad(out.square().sum(), args[:3]) for out in (got, want)), strict=True)
    for ours, theirs in gradients:
        near(ours, theirs, GRADIENT_BACKSTOP[torch.float32])
    del ran[:]
    assert torch.equal(compiled(*args), want) and not ran, "outside the context it is torch's again"
    assert len(graphs.calls) == 2 and graphs.has("scaled_dot_product_attention")


@needs_engine
def test_the_context_within_a_compiled_function(graphs: Graphs) -> None:
    def both(q: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa.enabled():
            ours = F.scaled_dot_product_attention(q, q, q)
        return ours, F.scaled_dot_product_attention(q, q, q)

    q = x(2, 2, 9, 8)
    ours, theirs = torch.compile(both, backend=graphs, fullgraph=True)(q)
    near(ours, theirs, BACKSTOP[torch.float32])
    assert len(graphs.calls) == 1 and graphs.has("polyflash") and graphs.has("scaled_dot_product_attention")


@needs_engine
def test_lengths_do_not_recompile(graphs: Graphs) -> None:
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
                             backend=graphs, fullgraph=True)  # fmt: skip
    with sdpa.enabled(strict=True):
        for seqlen in (9, 7, 11, 30):
            q = x(2, 2, seqlen, 8)
            near(compiled(q), TORCH(q, q, q, is_causal=True), BACKSTOP[torch.float32])
    assert len(graphs.calls) <= 2


@pytest.mark.parametrize("entry", ["Tensor.backward", "autograd.backward", "autograd.grad"])
def test_checkpointing_within_the_context(entry: str, ran: list[tuple[str, str]]) -> None:
    from torch.utils.checkpoint import checkpoint

    q = x(2, 2, 9, 8).requires_grad_()

    def block(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).sin()

    gradients = []
    for saved in (True, False):
        torch.manual_seed(5)
        with sdpa.enabled(strict=True):
            out = block(q) if saved else checkpoint(block, q, use_reentrant=False)
            if entry == "autograd.grad":
                q.grad = torch.autograd.grad(out, q, torch.ones_like(out))[0]
            else:
                q.grad = None
                out.sum().backward() if entry == "Tensor.backward" else torch.autograd.backward([out.sum()])
        gradients.append(q.grad)
    assert torch.equal(*gradients)
    assert [phase for phase, _ in ran] == ["forward", "backward", "forward", "forward", "backward"]


def modules(train: bool) -> dict[str, Callable[[], Tensor]]:
    """Calls of torch's own modules, the same weights and inputs each time."""
    torch.manual_seed(11)
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
    own = torch.nn.MultiheadAttention(32, 4, **options).train(train)
    other = torch.nn.MultiheadAttention(32, 4, kdim=24, vdim=20, bias=False, **options).train(train)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, **options).train(train)
    decoder = torch.nn.TransformerDecoderLayer(32, 4, 48, **options).train(train)
    a, b, c, d = x(3, 9, 32), x(3, 7, 32), x(3, 7, 24), x(3, 7, 20)
    padding = torch.arange(9).expand(3, 9) >= torch.tensor([9, 5, 7])[:, None]
    causal = torch.nn.Transformer.generate_square_subsequent_mask(9)
    hidden = torch.rand(9, 9) > 0.6
    hidden[:, 0] = False
    per_head = x(12, 9, 9)
    plain: dict[str, Any] = {"need_weights": False}
    return {
        "self": lambda: own(a, a, a, **plain)[0],
        "cross": lambda: own(a, b, b, **plain)[0],
        "cross, value of its own": lambda: own(a, b, b.flip(0), **plain)[0],
        "unbatched": lambda: own(a[0], a[0], a[0], **plain)[0],
        "padding": lambda: own(a, a, a, key_padding_mask=padding, **plain)[0],
        "bool mask": lambda: own(a, a, a, attn_mask=hidden, **plain)[0],
        "float mask per head": lambda: own(a, a, a, attn_mask=per_head, **plain)[0],
        "bool mask and padding": lambda: own(a, a, a, attn_mask=hidden, key_padding_mask=padding, **plain)[0],
        "float mask and padding": lambda: own(
            a, a, a, attn_mask=causal, key_padding_mask=torch.zeros(3, 9).masked_fill(padding, -INF), **plain
        )[0],
        "causal hint": lambda: own(a, a, a, attn_mask=causal, is_causal=True, **plain)[0],
        "causal hint and padding": lambda: own(
            a, a, a, attn_mask=hidden, key_padding_mask=padding, is_causal=True, **plain
        )[0],
        "other widths, no bias": lambda: other(a, c, d, **plain)[0],
        "encoder layer": lambda: layer(a),
        "encoder layer, padding": lambda: layer(a, src_key_padding_mask=padding)[~padding],
        "encoder layer, causal": lambda: layer(a, src_mask=causal, is_causal=True),
        "decoder layer": lambda: decoder(a, b, tgt_mask=causal, tgt_is_causal=True),
    }


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", modules(True))
def test_modules_of_torch(name: str, train: bool, ran: list[tuple[str, str]]) -> None:
    want = modules(train)[name]()
    assert not ran
    with sdpa.enabled(strict=True):
        got = modules(train)[name]()
    assert ran and {backend for _, backend in ran} == {HERE[0]}
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)
    assert got.shape == want.shape


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("masked", ["", "two dimensions", "per head"])
def test_bool_masks_of_the_functional_form(masked: str, padded: bool, ran: list[tuple[str, str]]) -> None:
    """True hides a key here; modules make floats of them first."""
    own = torch.nn.MultiheadAttention(32, 4)
    weights = (
        own.in_proj_weight,
        own.in_proj_bias,
        None,
        None,
        False,
        0.0,
        own.out_proj.weight,
        own.out_proj.bias,
    )
    a, b = x(5, 3, 32), x(7, 3, 32)
    hidden = {"": None, "two dimensions": torch.rand(5, 7) > 0.6, "per head": torch.rand(12, 5, 7) > 0.6}
    padding = torch.arange(7).expand(3, 7) >= torch.tensor([7, 4, 6])[:, None] if padded else None
    options = {"need_weights": False, "attn_mask": hidden[masked], "key_padding_mask": padding}
    want, _ = F.multi_head_attention_forward(a, b, b, 32, 4, *weights, **options)
    with sdpa.enabled(strict=True):
        got, none = F.multi_head_attention_forward(a, b, b, 32, 4, *weights, **options)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)
    assert none is None and len(ran) == 1


def test_modules_drop_in_training_alone() -> None:
    own, a = torch.nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True), x(2, 9, 32)
    with sdpa.enabled(strict=True):
        one, other = (own(a, a, a, need_weights=False)[0] for _ in range(2))
        assert not torch.equal(one, other)
        one, other = (own.eval()(a, a, a, need_weights=False)[0] for _ in range(2))
    assert torch.equal(one, other)


def test_modules_that_want_weights_or_added_keys_are_torchs() -> None:
    a = x(3, 9, 32)
    added = torch.nn.MultiheadAttention(32, 4, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    want = added(a, a, a)
    with sdpa.enabled(strict=True):  # there is no call of scaled_dot_product_attention in it
        got = added(a, a, a)
        bad = pytest.raises(RuntimeError, match="shape of the 2D attn_mask")
        with bad:
            added(a, a, a, attn_mask=torch.zeros(3, 3), need_weights=False)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_gradients_of_a_module_are_torchs() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    a = x(2, 9, 32)
    layer(a).square().sum().backward()
    want = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with sdpa.enabled(strict=True):
        layer(a).square().sum().backward()
    for (name, p), grad in zip(layer.named_parameters(), want, strict=True):
        torch.testing.assert_close(
            p.grad, grad, atol=1e-5 if ON_A_CPU else 3e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this torch has no registry"
)


FOR_FLASH = (
    *("plain", "causal, fewer rows", "causal, more rows", "float mask", "transposed", "nothing seen"),
    *("scale", "grouped, causal"),
)


@pytest.fixture
def active() -> Any:
    sdpa.activate()
    yield
    sdpa.deactivate()


@needs_registry
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
class TestRegistry:
    @pytest.mark.parametrize("name", FOR_FLASH)
    def test_results_and_gradients(self, name: str, ran: list[tuple[str, str]], active: None) -> None:
        args, options = CASES[name]()
        args = tuple(
            a if i < 3 or not a.is_floating_point() else a.requires_grad_(False) for i, a in enumerate(args)
        )
        q, k, v = (a.detach().requires_grad_() for a in args[:3])
        out = F.scaled_dot_product_attention(q, k, v, *args[3:], **options)
        weights = torch.randn_like(out)
        got = [out.detach(), *torch.autograd.grad(out, (q, k, v), weights)]
        assert [phase for phase, _ in ran] == ["forward", "backward"] and ran[0][1] == HERE[0]
        del ran[:]
        wide = [a.detach().double().requires_grad_() for a in (q, k, v)]
        with sdpa_kernel(SDPBackend.MATH):
            right = TORCH(*wide, *(a.double() if a.is_floating_point() else a for a in args[3:]), **options)
        right = [right.detach(), *torch.autograd.grad(right, wide, weights.double())]
        assert not ran, "the user's choice of another kernel is obeyed"
        for i, (ours, theirs) in enumerate(zip(got, right, strict=True)):
            near(ours, theirs, BACKSTOP[torch.float32] if i == 0 else GRADIENT_BACKSTOP[torch.float32])

    def test_it_is_undone(self, ran: list[tuple[str, str]]) -> None:
        q = x(1, 2, 9, 8)
        want = TORCH(q, q, q)
        sdpa.deactivate()  # nothing to do
        for _ in range(2):
            sdpa.activate()
            sdpa.activate()
            assert torch.nn.attention.current_flash_attention_impl() == "POLYFLASH"
            TORCH(q, q, q)
            sdpa.deactivate()
            assert torch.nn.attention.current_flash_attention_impl() is None
            assert torch.equal(TORCH(q, q, q), want) and len(ran) == 1
            del ran[:]

    def test_another_implementation_is_left_alone(self) -> None:
        class Handle:
            def remove(self) -> None: ...

        torch.nn.attention.register_flash_attention_impl("OTHER", register_fn=Handle)
        torch.nn.attention.activate_flash_attention_impl("OTHER")
        try:
            sdpa.deactivate()
            assert torch.nn.attention.current_flash_attention_impl() == "OTHER"
        finally:
            torch.nn.attention.restore_flash_attention_impl()

    def test_every_thread_and_compiled_functions_have_it(
        self, ran: list[tuple[str, str]], active: None, graphs: Graphs
    ) -> None:
        q = x(1, 2, 9, 8)
        thread = threading.Thread(target=lambda: TORCH(q, q, q))
        thread.start()
        thread.join()
        torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=graphs, fullgraph=True)(q)
        assert len(ran) == 2


NOTHING_PATCHED = """
import importlib, sys
import torch
from torch.nn import functional as F
def patchable():
    return vars(F) | {n: x for n, x in vars(torch.nn.attention).items() if callable(x)}
before = patchable()
impls = getattr(torch.nn.attention, "list_flash_attention_impls", list)
names = impls()
def backends():
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    return list(AttentionBackendName.__members__), _AttentionBackendRegistry.list_backends()
def functions():
    from transformers import AttentionInterface
    return list(AttentionInterface().valid_keys())
found = []
for look in (backends, functions):
    try:
        found.append((look, look()))
    except ImportError:
        pass
for name in ("sdpa", "flash_attn", "diffusers", "transformers"):
    try:
        importlib.import_module(f"polyflash.integrations.{name}")
    except ImportError as error:
        assert "pip install" in str(error)
assert before == patchable()
assert impls() == names and torch.overrides._len_torch_function_stack() == 0
assert all(look() == was for look, was in found)
assert "flash_attn" not in sys.modules and "xformers" not in sys.modules
"""


def test_importing_the_plug_ins_patches_nothing() -> None:
    done = processes.begun(["-c", NOTHING_PATCHED])
    assert done.returncode == 0, done.stderr
