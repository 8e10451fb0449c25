"""The backward kernels, called as a plan calls them, in Triton's interpreter or on the GPU under test.

They are held to the float64 oracle's gradients, and in what is not finite to the readable specification, the
torch row."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyflash import env
from polyflash.backends.torch import backward as torch_backward
from polyflash.backends.torch import forward as torch_forward
from polyflash.backends.torch.configs import Config
from polyflash.reference import attention_reference
from polyflash.spec import Arguments
from polyflash.target import Target
from tests import device
from tests.chosen import chosen

if not env.TRITON_INTERPRET.is_set() and device.DEVICE.type == "cpu":
    pytest.skip("needs Triton's interpreter or a GPU", allow_module_level=True)

from polyflash.backends.triton import backward, runtime
from polyflash.backends.triton.configs import BackwardConfig

NAMES = ("q", "k", "v", "bias", "sinks")
ALL = (True,) * 5
CONFIG = BackwardConfig(16, 32, 4, 1, 32, 16, 4, 1)
BOUND = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _drawn() -> None:
    torch.manual_seed(0)


def qkv(
    heads: tuple[int, int] = (2, 2), rows: int = 21, keys: int = 39, dims: tuple[int, int] = (16, 16),
    batch: int = 1, dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shapes = (heads[0], rows, dims[0]), (heads[1], keys, dims[0]), (heads[1], keys, dims[1])
    return tuple(torch.randn(batch, *shape).to(dtype) for shape in shapes)  # type: ignore[return-value]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def there(x: Any) -> Any:
    """Operands on the device under test; a seed stays."""
    return x.to(device.DEVICE) if isinstance(x, Tensor) and x.dtype is not torch.int64 else x


def launched(config: BackwardConfig = CONFIG) -> Any:
    spec = SimpleNamespace(dtype="float32", tf32=False)
    return SimpleNamespace(config=config, prepared=None, target=Target("cpu:interpreted", cores=3), spec=spec)


def differentiate(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    args: Arguments, needs: tuple[bool, ...] = ALL, config: BackwardConfig = CONFIG,
) -> dict[str, Tensor]:  # fmt: skip
    given = map(there, (dout, dlse, q, k, v, out, lse))
    found = backward.run(launched(config), *given, Arguments(*map(there, args)), needs)
    return {n: x.cpu() for n, x in zip(NAMES, found, strict=True) if x is not None}


def oracle(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Gradients by name, and (dout, dlse, out, lse) of the call."""
    given = {"q": q, "k": k, "v": v, **{n: options[n] for n in NAMES[3:] if n in options}}
    leaves = {n: x.double().requires_grad_() for n, x in given.items()}
    rest = {**options, **{n: leaves[n] for n in NAMES[3:] if n in options}}
    out, lse = attention_reference(leaves["q"], leaves["k"], leaves["v"], **rest)
    dout, dlse = torch.randn(out.shape).to(q.dtype), torch.randn(lse.shape)
    loss = (out * dout).sum() + torch.where(torch.isfinite(lse), lse * dlse, 0).sum()
    found = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True)), (dout, dlse, out.detach().to(q.dtype), lse.detach().float())


def arguments_of(options: dict[str, Any]) -> Arguments:
    """The kernel's arguments of the oracle's options."""
    given = dict(options)
    if "window" in given:
        given["window_left"], given["window_right"] = given.pop("window")
    if isinstance(given.get("q_offset"), int):
        given["offset"] = given.pop("q_offset")
    if "dropout_seed" in given:
        given["dropout_seed"] = torch.tensor(given["dropout_seed"])
    return Arguments(**given)


def hold(q: Tensor, k: Tensor, v: Tensor, config: BackwardConfig = CONFIG, **options: Any) -> None:
    want, (dout, dlse, out, lse) = oracle(q, k, v, options)
    got = differentiate(dout, dlse, q, k, v, out, lse, arguments_of(options), config=config)
    assert set(got) == set(want)
    for name, right in want.items():
        assert got[name].shape == right.shape
        assert got[name].dtype is {"q": q, "k": k, "v": v, **options}[name].dtype
        error = float((got[name].double() - right).norm() / (right.norm() + 1e-30))
        assert error <= BOUND[q.dtype], f"d{name}: {error:.2e}"


@pytest.mark.parametrize("heads", ((2, 2), (4, 2)), ids=("alone", "grouped"))
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"causal": True},
        {"scale": -0.3, "causal": True},
        {"scale": 0.0},
        {"window": (9, 3)},
        {"window": (3, None), "causal": True},
        {"causal": True, "q_offset": -7},
        {"causal": True, "q_offset": ints(5)},
        {"softcap": 2.0, "causal": True},
        {"kv_lens": ints(33), "kv_starts": ints(7), "causal": True},
        {"kv_lens": ints(0)},
        {"dropout_p": 0.3, "dropout_seed": -12345678901},
    ),
    ids=str,
)
def test_every_plain_feature(heads: tuple[int, int], options: dict[str, Any]):
    hold(*qkv(heads), **options)


def test_blocks_seen_whole_between_both_edges_of_a_window():
    hold(*qkv((2, 1), 90, 70), window=(50, 10))


@pytest.mark.parametrize("heads", ((2, 2), (4, 2)), ids=("alone", "grouped"))
def test_operands_of_pairs_and_heads(heads: tuple[int, int]):
    q, k, v = qkv(heads)
    hold(q, k, v, mask=torch.randn(1, heads[0], 21, 39) > 0, sinks=torch.randn(heads[0]))
    hold(q, k, v, alibi_slopes=torch.rand(heads[0]), causal=True)
    hold(q, k, v, bias=torch.randn(heads[0], 21, 39), causal=True, softcap=3.0, dropout_p=0.3, dropout_seed=5)


@pytest.mark.parametrize("shape", ((2, 1, 21, 39), (4, 21, 39), (4, 1, 39), (2, 4, 21, 1), (1,), ()), ids=str)
def test_bias_is_summed_where_it_broadcasts(shape: tuple[int, ...]):
    hold(*qkv((4, 2), batch=2), bias=torch.randn(shape), causal=True)


@pytest.mark.parametrize("dims", ((64, 64), (40, 96), (80, 48)), ids=str)
def test_channels_in_two_blocks(dims: tuple[int, int]):
    hold(*qkv((4, 2), 10, 23, dims), causal=True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_sixteen_bits(dtype: torch.dtype):
    hold(*qkv((4, 2), dtype=dtype), causal=True, sinks=torch.randn(4).to(dtype))


@pytest.mark.parametrize("options", ({"base2": False}, {"fused": True}), ids=str)
def test_named_techniques(options: dict[str, bool]):
    hold(*qkv((4, 2)), BackwardConfig(16, 32, 4, 1, 32, 16, 4, 1, **options), causal=True)


def agree(q: Tensor, k: Tensor, v: Tensor, args: Arguments, dout: Tensor | None = None) -> dict[str, Tensor]:
    """The kernels and the torch row: the same elements not finite, in the same way, and the others near."""
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype)
    lse = torch.empty(q.shape[:3])
    rows = SimpleNamespace(config=Config(16, 16), rung="")
    torch_forward.run(rows, q, k, v, out, lse, args._replace(need_lse=True))  # type: ignore[arg-type]
    dout = torch.randn(out.shape).to(q.dtype) if dout is None else dout
    dlse = torch.randn(lse.shape)
    want = torch_backward.run(rows, dout, dlse, q, k, v, out, lse, args, ALL)  # type: ignore[arg-type]
    got = differentiate(dout, dlse, q, k, v, out, lse, args)
    for name, right in zip(NAMES, want, strict=True):
        if right is None:
            assert name not in got
            continue
        mine, bad = got[name], ~right.isfinite()
        assert torch.equal(~mine.isfinite(), bad), f"d{name}: other elements are not finite"
        assert torch.equal(mine[bad].isnan(), right[bad].isnan()), name
        mine, right = (x.masked_fill(bad, 0).double() for x in (mine, right))
        error = float((mine - right).norm() / (right.norm() + 1e-30))
        assert error <= BOUND[q.dtype], f"d{name}: {error:.2e}"
    return got


def put(x: Tensor, *at: Any, value: float = NAN) -> Tensor:
    x = x.clone()
    x[at] = value
    return x


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_what_is_not_finite_reaches_who_sees_it(dtype: torch.dtype):
    """Rows 3 and 5 and keys 30 to 35 of a causal call: no other row or key may learn of them."""
    q, k, v = qkv((4, 2), dtype=dtype)
    dout, causal = torch.randn(q.shape).to(dtype), Arguments(causal=True)
    got = agree(put(q, 0, 0, 3), put(k, 0, 0, 30), put(v, 0, 0, 35), causal, put(dout, 0, 1, 5))
    assert got["k"][0, 1].isfinite().all() and got["q"][0, 2:].isfinite().all()
    two = put(put(dout, 0, 1, 5, 3, value=INF), 0, 0, 7, 3, value=-INF)
    agree(q, k, v, causal, two)
    agree(q, k, v, Arguments(), two)


def test_hidden_is_absent():
    """NaN behind a mask, behind the live keys and in empty rows: bits as without them."""
    q, k, v = qkv((2, 1), batch=2)
    dout, sinks = torch.randn(q.shape), torch.randn(2)
    mask = torch.rand(2, 1, 1, 39) < 0.6
    hidden = ~mask[:, :, 0, :, None]
    agree(q, k.masked_fill(hidden, NAN), v.masked_fill(hidden, NAN), Arguments(mask=mask, sinks=sinks))
    lengths = Arguments(kv_lens=ints(17, 39), causal=True)
    behind = (0, slice(None), slice(17, None))
    agree(q, put(k, *behind), put(v, *behind), lengths)
    empty = torch.zeros(21, 1, dtype=torch.bool).expand(21, 39).clone()
    empty[:8] = True
    late = (slice(None), slice(None), slice(14, None))
    q, k, v, dout = q[:1], k[:1], v[:1], dout[:1]
    for args in (Arguments(mask=empty), Arguments(mask=empty, sinks=sinks)):
        agree(put(q, *late), k, v, args, put(dout, *late))


def test_row_whose_scores_are_all_minus_infinite():
    """It is an empty row: no key learns of its dO."""
    q, k, v = qkv((2, 1), 10, 10)
    q = put(q, 0, 0, 4, 0, value=-INF)
    got = agree(q, k.abs(), v, Arguments(causal=True), put(torch.randn(q.shape), 0, 0, 4))
    assert all(got[n].isfinite().all() for n in "qkv") and (got["q"][0, 0, 4] == 0).all()


def test_nan_of_a_bias():
    """Of rows 3 and 5 at keys they see; and of row 4 where it does not look."""
    bias = put(put(put(torch.randn(21, 39), 3, 0), 5, 20), 4, 38)
    got = agree(*qkv((2, 1)), Arguments(bias=bias, causal=True))
    assert got["k"][0, 0, 24:].isfinite().all() and got["q"][0, :, 4].isfinite().all()


def test_finite_masks():
    """finfo.min hides as far as it can: whole rows of it, and rows of -inf beside them."""
    bias = torch.where(torch.rand(21, 39) < 0.3, torch.finfo(torch.float32).min, 0.0)
    bias[3], bias[5] = torch.finfo(torch.float32).min, -INF
    got = agree(*qkv(), Arguments(bias=bias))
    assert (got["q"][:, :, 5] == 0).all() and (got["bias"][5] == 0).all()


def test_ids_and_interval_lists():
    q, k, v = qkv((4, 2))
    ids = torch.arange(39, dtype=torch.int32)[None] // 13
    agree(q, k, v, Arguments(q_segments=ids[:, :21], k_segments=ids))
    lists = torch.tensor([[[0, 5], [9, 20]], [[3, 3], [30, 39]]], dtype=torch.int32).view(1, 1, 2, 2, 2)
    both = torch.cat((lists, lists.flip(2)), 1).repeat(1, 2, 1, 1, 1)
    agree(q, k, v, Arguments(intervals=both, interval_rows=16))


def test_packed_members():
    """Members of 7, 0 and 12 rows and of 12, 8 and 13 keys; what belongs to nobody is 0."""
    q, k, v = qkv((4, 2))
    packed = Arguments(
        causal=True, cu_seqlens_q=ints(0, 7, 7, 19), cu_seqlens_k=ints(0, 12, 20, 33), max_seqlen_q=12,
        max_seqlen_k=13, sinks=torch.randn(4),
    )  # fmt: skip
    for args in (
        packed,
        packed._replace(kv_lens=ints(5, 3, 9)),
        packed._replace(dropout_p=0.4, dropout_seed=torch.tensor(7), alibi_slopes=torch.rand(4)),
    ):
        got = agree(put(q, 0, 0, 20), put(k, 0, 0, 38), v, args)
        assert all((got[n][:, :, end:] == 0).all() for n, end in (("q", 19), ("k", 33), ("v", 33)))
    agree(put(q, 0, 0, 3), put(k, 0, 0, 13), v, packed)


def test_any_strides():
    q, k, v = qkv(batch=2)
    dout = torch.tensor(0.3).expand(2, 2, 21, 8)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    agree(q, k[:1].expand(2, -1, -1, -1), v[..., ::2], Arguments(causal=True), dout)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_asked_for_is_launched(name: str, monkeypatch: pytest.MonkeyPatch):
    q, k, v = qkv()
    options = {"bias": torch.randn(21, 39), "sinks": torch.randn(2)}
    want, (dout, dlse, out, lse) = oracle(q, k, v, options)
    kernels: list[str] = []
    launch = runtime.Kernels.launch
    monkeypatch.setattr(
        runtime.Kernels, "launch", lambda self, f, *a: (kernels.append(f.__name__), launch(self, f, *a))[1]
    )
    needs = tuple(n == name for n in NAMES)
    got = differentiate(dout, dlse, q, k, v, out, lse, arguments_of(options), needs)
    assert set(got) == {name}
    assert float((got[name].double() - want[name]).norm() / want[name].norm()) <= BOUND[torch.float32]
    pairs = {"q": {"make_dq"}, "bias": {"make_dbias"}, "sinks": set()}.get(name, {"make_dkv"})
    assert set(kernels) == {"center"} | pairs


def test_bits_repeat():
    q, k, v = qkv((2, 1), batch=2)
    options = {"bias": torch.randn(2, 1, 1, 39), "sinks": torch.randn(2), "causal": True}
    _, (dout, dlse, out, lse) = oracle(q, k, v, options)
    one, two = (differentiate(dout, dlse, q, k, v, out, lse, arguments_of(options)) for _ in range(2))
    assert all(torch.equal(one[n], two[n]) for n in NAMES)


def visible(rows: int, keys: int, args: Arguments) -> Tensor:
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    offset = keys - rows if args.offset is None else args.offset
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if args.causal or args.window_right is not None:
        seen &= j <= i + offset + (0 if args.causal else args.window_right)
    if args.window_left is not None:
        seen &= j >= i + offset - args.window_left
    return seen


@pytest.mark.parametrize("group", (1, 3))
@pytest.mark.parametrize(
    "args",
    (
        Arguments(),
        Arguments(causal=True),
        Arguments(causal=True, window_left=9),
        Arguments(window_left=40, window_right=3),
        Arguments(causal=True, offset=0),
        Arguments(causal=True, offset=-30),
        Arguments(causal=True, offset=60),
    ),
)
def test_only_tiles_that_someone_sees_are_visited(group: int, args: Arguments):
    """The counters of both kernels equal the tiles with a visible pair, counted pair by pair."""
    rows, keys = 50, 70
    q, k, v = qkv((group, 1), rows, keys)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
    prepared = backward.Prepared(launched())
    q, k, v, out, lse = map(there, (q, k, v, out, lse))
    centered = backward.centers(prepared, (q, k, v), (out, out, lse, None), None)
    call = backward.prepare_call(prepared, q, k, v, centered, args)
    seen = visible(rows, keys, args).repeat_interleave(group, 0)
    for kernel, block_m, block_n in (("dkv", 16, 32), ("dq", 32, 16)):
        padded = torch.zeros(
            -(-rows * group // block_m) * block_m, -(-keys // block_n) * block_n, dtype=torch.bool
        )
        padded[: rows * group, :keys] = seen
        tiles = padded.unflatten(0, (-1, block_m)).unflatten(2, (-1, block_n)).any(3).any(1)
        visits = torch.full((tiles.shape[kernel == "dkv"],), -1, dtype=torch.int32, device=device.DEVICE)
        if kernel == "dkv":
            backward.launch_dkv(call, torch.empty_like(k), torch.empty_like(v), visits=visits)
            want = tiles.sum(0)
        else:
            backward.launch_dq(call, torch.empty_like(q), visits)
            want = tiles.sum(1)
            order = args.causal or args.window_right is not None  # the last rows start first
            want = want.flip(0) if order else want
        assert visits.tolist() == want.tolist(), kernel


def test_a_launch_is_found_again(monkeypatch: pytest.MonkeyPatch):
    """Keys of equal calls are equal, and hold no tensor."""
    keys: list[tuple[Any, ...]] = []

    def keep(self: Any, kernel: Any, grid: Any, arguments: Any, options: Any, key: Any, device: Any) -> None:
        keys.append(key)

    monkeypatch.setattr(runtime.Kernels, "launch", keep)
    launch = launched()
    for _ in range(2):
        q, k, v = map(there, qkv((4, 2)))
        lse = torch.zeros(q.shape[:3], device=q.device)
        args = Arguments(bias=there(torch.randn(21, 39)), sinks=there(torch.randn(4)))
        backward.run(launch, q, lse, q, k, v, q, lse, args, ALL)
    half = len(keys) // 2
    assert half == 5 and keys[:half] == keys[half:] and len({hash(key) for key in keys}) == half


@pytest.mark.parametrize("apart", chosen((0, 1, 2), 2))
def test_float32_in_parts(apart: int):
    """Parts that `center` wrote, of any strides and head dims; what is not finite takes other kernels."""
    config = replace(CONFIG, precision="bf16x6", apart=apart)
    q, k, v = qkv((4, 2), dims=(24, 40))
    q, v = q.mT.contiguous().mT, v.mT.contiguous().mT
    hold(q, k, v, config, causal=True, bias=torch.randn(21, 39), dropout_p=0.2, dropout_seed=3)
    mask = torch.rand(21, 39) < 0.7
    mask[:, 7] = False
    want, (dout, dlse, out, lse) = oracle(q, k, v, {"mask": mask})
    k, v = put(k, 0, 0, 7, 3), put(v, 0, 0, 7, 3, value=INF)
    got = differentiate(dout, dlse, q, k, v, out, lse, Arguments(mask=mask), config=config)
    for name, right in want.items():
        torch.testing.assert_close(got[name].double(), right, rtol=1e-4, atol=1e-5)


PACKED = {"cu_seqlens_q": ints(0, 7, 7, 50), "cu_seqlens_k": ints(0, 12, 20, 33)}
SOME = {"full": {}, "window": {"window_left": 9, "window_right": 3}, "lens": {"kv_lens": ints(33)}}
MADE_AGAIN = SOME | {"packed": PACKED}


@pytest.mark.parametrize(
    ("name", "keys"),
    chosen(product(MADE_AGAIN, (40, 200)), ("window", 200), ("lens", 200)),
)
def test_all_is_made_again_in_one_launch_or_nothing(name: str, keys: int):
    """As behind another engine's gradients, whatever those are."""
    (q, k, v), args = qkv((4, 2), 57, keys), Arguments(causal=True, need_lse=True, **MADE_AGAIN[name])
    out, lse, dout = torch.empty(q.shape), torch.empty(q.shape[:3]), torch.randn(q.shape)
    rows = SimpleNamespace(config=Config(16, 16), rung="")
    torch_forward.run(rows, q, k, v, out, lse, args)  # type: ignore[arg-type]
    q, k, v, out, dout, lse = map(there, (q, k, v, out, dout, lse))
    args = Arguments(*map(there, args))
    want = backward.run(launched(), dout, None, q, k, v, out, lse, args, ALL)[:3]
    prepared = backward.Prepared(launched(), CONFIG)
    for odd in (0, 1):
        made = [torch.full_like(x, 7.0) for x in (q, k, v)]
        lens = None if args.cu_seqlens_q is not None else args.kv_lens
        centered = backward.centers(prepared, (q, k, v), (out, dout, lse, None), lens)
        centered[2].fill_(odd)
        backward.launch_again(backward.prepare_call(prepared, q, k, v, centered, args), *made)
        for x, right in zip(made, want, strict=True):
            assert torch.allclose(x, right, atol=1e-4) if odd else bool((x == 7.0).all())
