"""Kernels of the Gluon engine on a device, each group in a child process that is killed once it is silent for
60 s: a wrong barrier hangs, and a GPU that hangs takes its process with it.

    python -m tests.backends.gluon.guarded               right, alone: against float64, and odd values
    python -m tests.backends.gluon.guarded --contend 8   the same bits in processes that preempt one another

Exit status 1: something is wrong, and was said.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import polyflash
from polyflash.backends.gluon import configs

SECONDS = 60
ERROR = {torch.bfloat16: 6e-3, torch.float16: 8e-4}  # relative L2, of results of that dtype


class Case(NamedTuple):
    dims: int
    causal: bool
    rows: int
    keys: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    dtype: torch.dtype = torch.bfloat16
    offset: int | tuple[int, ...] | None = None  # one, or one per request, as those that follow
    layout: str = "bhsd"
    window: tuple[int | None, int | None] | None = None
    lens: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False


def tensors(case: Case, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator("cuda").manual_seed(seed)
    found = []
    for heads, rows in ((case.heads, case.rows), (case.kv_heads, case.keys), (case.kv_heads, case.keys)):
        shape = (case.batch, heads, rows, case.dims)
        if case.layout == "bshd":
            shape = (case.batch, rows, heads, case.dims)
        found.append(torch.randn(shape, generator=draw, device="cuda").to(case.dtype))
    return found


def call(case: Case, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """out and lse as (batch, heads, rows, ...)."""
    options: dict[str, Any] = {"causal": case.causal, "layout": case.layout, **more}
    if case.softcap:
        options["softcap"] = case.softcap
    if case.sinks:
        options["sinks"] = sinks_of(case)
    if case.alibi:
        options["alibi_slopes"] = slopes_of(case)
    if case.window is not None:
        options["window"] = case.window
    for name, x in (("q_offset", case.offset), ("kv_lens", case.lens), ("kv_starts", case.starts)):
        if x is not None:
            options[name] = x if isinstance(x, int) else torch.tensor(x, dtype=torch.int32, device="cuda")
    result = polyflash.attention(q, k, v, return_lse=True, backend="gluon", **options)
    return result.out if case.layout == "bhsd" else result.out.transpose(1, 2), result.lse


def sinks_of(case: Case) -> Tensor:
    return torch.linspace(-3.0, 9.0, case.heads, device="cuda")


def slopes_of(case: Case) -> Tensor:
    return torch.linspace(0.01, 0.1, case.heads, device="cuda")


def each(case: Case, x: Any, default: int) -> Tensor:
    """A number per request, (batch, 1, 1, 1)."""
    x = default if x is None else x
    x = torch.tensor([x] * case.batch if isinstance(x, int) else x, device="cuda")
    return x[:, None, None, None]


def positions(case: Case) -> Tensor:
    """Of rows among the keys of their request, (batch, 1, rows, 1)."""
    live = each(case, case.lens, case.keys)
    at = torch.arange(case.rows, device="cuda")[:, None]
    return at + (live - case.rows if case.offset is None else each(case, case.offset, 0))


def seen(case: Case) -> Tensor:
    """Which key a row sees, bool (batch, 1, rows, keys)."""
    live, at = each(case, case.lens, case.keys), positions(case)
    keys = torch.arange(case.keys, device="cuda")[None, :]
    found = (keys < live) & (keys >= each(case, case.starts, 0)) & (at == at)
    left, right = case.window or (None, None)
    right = 0 if case.causal else right
    found = found if right is None else found & (keys <= at + right)
    return found if left is None else found & (keys >= at - left)


def right(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float64."""
    if case.layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = case.heads // case.kv_heads
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(case.dims)
    scores = case.softcap * (scores / case.softcap).tanh() if case.softcap else scores
    if case.alibi:
        steps = (positions(case) - torch.arange(case.keys, device="cuda")).abs()
        scores = scores - slopes_of(case).double()[:, None, None] * steps
    scores = scores.masked_fill(~seen(case), -math.inf)
    lse = scores.logsumexp(-1)
    if case.sinks:
        lse = torch.logaddexp(lse, sinks_of(case).double()[:, None])
    weights = (scores - lse[..., None].nan_to_num(neginf=0.0)).exp()
    return weights @ v, lse


def check(case: Case) -> None:
    q, k, v = tensors(case)
    out, lse = call(case, q, k, v)
    again, _ = call(case, q, k, v)  # recorded
    third, _ = call(case, q, k, v)  # replayed
    wanted, wanted_lse = right(case, q, k, v)
    assert torch.equal(out, again) and torch.equal(out, third), f"{case}: bits differ from call to call"
    assert bool(out.isfinite().all()), f"{case}: not finite"
    empty = wanted_lse == -math.inf
    blind = ~seen(case).any(-1).expand(empty.shape)
    assert torch.equal(lse == -math.inf, empty) and not out[blind].any(), f"{case}: rows that see nothing"
    error = float((out.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
    off = float((lse.double() - wanted_lse)[~empty].abs().max()) if not bool(empty.all()) else 0.0
    print(f"{error:.2e} {off:.1e} {case}", flush=True)
    assert error < ERROR[case.dtype], f"{case}: error {error}"
    assert off < 2e-5, f"{case}: lse off by {off}"


def shapes(dims: int, causal: bool) -> Iterator[Case]:
    for rows, keys in (
        (1, 1),
        (64, 64),
        (5, 200),
        (200, 5),
        (127, 129),
        (333, 777),
        (1000, 1000),
        (777, 130),
    ):
        yield Case(dims, causal, rows, keys)
    yield Case(dims, causal, 257, 511, layout="bshd", batch=2)
    yield Case(dims, causal, 257, 511, dtype=torch.float16, heads=3, kv_heads=1, batch=3)
    yield Case(dims, causal, 3840, 3840, heads=16, kv_heads=16)
    if causal:
        for offset in (0, -100, 50, 5000, -5000):
            yield Case(dims, causal, 300, 400, offset=offset)


def bounded(dims: int, causal: bool) -> Iterator[Case]:
    """Windows, lengths and starts of requests, by themselves and together."""
    for rows, keys in ((1, 1), (200, 700), (700, 200), (1000, 1000), (130, 3000)):
        for window in ((0, 0), (63, None), (None, 5), (128, 17), (200, 300), (2000, None), (5000, 5000)):
            yield Case(dims, causal, rows, keys, window=window)
        yield Case(dims, causal, rows, keys, batch=4, lens=(0, keys // 3, 1, keys))
        yield Case(dims, causal, rows, keys, batch=3, starts=(0, keys // 2, keys))
        yield Case(dims, causal, rows, keys, batch=3, lens=(keys, keys // 2, 0), window=(100, 20))
        yield Case(dims, causal, rows, keys, batch=2, offset=(0, -50), window=(100, None))
        yield Case(
            dims,
            causal,
            rows,
            keys,
            batch=2,
            lens=(keys // 2, keys),
            starts=(min(3, keys), keys // 3),
            offset=70,
        )
        yield Case(dims, causal, rows, keys, softcap=3.0)
        yield Case(dims, causal, rows, keys, alibi=True)
        yield Case(dims, causal, rows, keys, batch=2, alibi=True, softcap=9.0, lens=(keys, keys // 2))
        yield Case(dims, causal, rows, keys, softcap=30.0, window=(200, 0), sinks=True)
        yield Case(dims, causal, rows, keys, batch=3, sinks=True, lens=(0, keys // 2, keys))
    yield Case(dims, causal, 257, 511, window=(90, 30), dtype=torch.float16, heads=3, kv_heads=1)
    yield Case(dims, causal, 3840, 3840, heads=16, kv_heads=16, window=(777, 0))


MEMBERS = ((333, 777), (1, 130), (0, 20), (64, 64), (200, 0), (128, 128), (1000, 1000), (5, 3), (192, 300))


TAIL = 7  # tokens of nobody, behind packed members


def packed_tensors(dims: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    """q, k, v and where members begin in each, as int64."""
    draw = torch.Generator("cuda").manual_seed(0)
    bounds = [torch.tensor([0, *itertools.accumulate(x)], device="cuda") for x in zip(*MEMBERS, strict=True)]
    cu_q, cu_k = bounds
    q = torch.randn(int(cu_q[-1]) + TAIL, heads, dims, generator=draw, device="cuda").bfloat16()
    k, v = torch.randn(2, int(cu_k[-1]) + TAIL, kv_heads, dims, generator=draw, device="cuda").bfloat16()
    return q, k, v, cu_q, cu_k


def packed_gradients(dims: int, causal: bool) -> None:
    """The same of gradients; tokens of nobody have none."""
    if dims > configs.MOST_BACKWARD:
        return
    q, k, v, cu_q, cu_k = packed_tensors(dims)
    draw = torch.Generator("cuda").manual_seed(1)
    dout = torch.randn(q.shape, generator=draw, device="cuda").bfloat16()
    dlse = torch.randn(q.shape[1], q.shape[0], generator=draw, device="cuda")
    for window in (None, (100, 30), (40, None)):

        def run(q: Tensor, k: Tensor, v: Tensor, window: Any = window) -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            more = {"causal": causal, "window": window, "return_lse": True, "backend": "gluon"}
            made = polyflash.attention_varlen(*leaves, cu_q.int(), cu_k.int(), **more)
            seeing = dlse.masked_fill(made.lse == -math.inf, 0.0)
            return torch.autograd.grad((made.out, made.lse), leaves, (dout, seeing))

        got = run(q, k, v)
        assert all(map(torch.equal, run(q, k, v), got)), "bits of gradients differ from call to call"
        assert not any(x[-TAIL:].any() for x in got), "tokens of nobody have gradients"
        for i, (rows, keys) in enumerate(MEMBERS):
            at_q, at_k = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
            mine = [x[at].transpose(0, 1)[None] for x, at in zip(got, (at_q, at_k, at_k), strict=True)]
            if not (rows and keys):
                assert not any(x.any() for x in mine), f"member {i} has gradients"
                continue
            case = Case(dims, causal, rows, keys, window=window)
            alone = [x.transpose(0, 1)[None] for x in (q[at_q], k[at_k], v[at_k])]
            above = dout[at_q].transpose(0, 1)[None], dlse[:, at_q][None]
            hold_gradients(case, mine, right_gradients(case, alone, *above))


def packed(dims: int, causal: bool) -> None:
    """Members of a packed call are as calls of their own; what is hidden in one changes no other."""
    q, k, v, cu_q, cu_k = packed_tensors(dims)
    for window in (None, (100, 30)):

        def run(q: Tensor, k: Tensor, v: Tensor, window: Any = window) -> Any:
            more = {"causal": causal, "window": window, "return_lse": True, "backend": "gluon"}
            return polyflash.attention_varlen(q, k, v, cu_q.int(), cu_k.int(), **more)

        got = run(q, k, v)
        assert torch.equal(run(q, k, v).out, got.out), "bits differ from call to call"
        assert not got.out[-TAIL:].any() and bool((got.lse[..., -TAIL:] == -math.inf).all()), "rows of nobody"
        for i, (rows, keys) in enumerate(MEMBERS):
            at_q, at_k = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
            if not (rows and keys):
                assert not got.out[at_q].any(), f"member {i} sees something"
                continue
            case = Case(dims, causal, rows, keys, window=window)
            alone = [x.transpose(0, 1)[None] for x in (q[at_q], k[at_k], v[at_k])]
            wanted, wanted_lse = right(case, *alone)
            mine, mine_lse = got.out[at_q].transpose(0, 1)[None], got.lse[..., at_q][None]
            error = float((mine.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
            empty = wanted_lse == -math.inf
            assert torch.equal(mine_lse == -math.inf, empty), f"{case}: rows that see nothing"
            off = float((mine_lse.double() - wanted_lse)[~empty].abs().max()) if bool((~empty).any()) else 0.0
            print(f"{error:.2e} {off:.1e} member {i} {case}", flush=True)
            assert error < ERROR[torch.bfloat16] and off < 2e-5, f"{case}: error {error}, lse off by {off}"
        for bad, i in itertools.product((math.nan, math.inf), (3, 6)):
            x, y = k.clone(), v.clone()
            x[cu_k[i] : cu_k[i + 1]] = y[cu_k[i] : cu_k[i + 1]] = bad
            spoiled = run(q, x, y)
            same = (spoiled.out == got.out).all(-1).all(-1)
            same[cu_q[i] : cu_q[i + 1]] = True
            assert bool(same.all()), f"{bad} of member {i} shows in another"


def odd_bounds(dims: int, causal: bool) -> None:
    """The same for what windows, lengths and starts hide."""
    case = Case(dims, causal, 500, 900, 3, window=(250, 60), lens=(900, 500, 0), starts=(0, 130, 5))
    q, k, v = tensors(case)
    out, lse = call(case, q, k, v)
    sees = seen(case)
    hidden = ~sees.any(2).squeeze(1)  # [batch, keys]
    for bad in (math.nan, math.inf, -math.inf):
        unseen = hidden[:, None, :, None]
        for x, y in ((k.masked_fill(unseen, bad), v), (k, v.masked_fill(unseen, bad))):
            got, got_lse = call(case, q, x, y)
            assert torch.equal(got, out) and torch.equal(got_lse, lse), f"{case}: hidden {bad} shows"
        x = v.clone()
        at = [5, 300, 310, 640, 899]
        x[:, :, at, 3] = bad
        got, _ = call(case, q, k, x)
        marked = sees[..., at].any(-1).expand(-1, case.heads, -1)
        column = got[..., 3]
        there = column.isnan() if math.isnan(bad) else column == bad
        assert torch.equal(there, marked), f"{case}: visible {bad} does not show, or a hidden one does"
        got[..., 3] = torch.where(marked, out[..., 3], column)
        assert torch.equal(got, out), f"{case}: visible {bad} shows elsewhere"
    far = q * 300.0
    got, got_lse = call(case, far, k, v)
    wanted, wanted_lse = right(case, far, k, v)
    error = float((got.double() - wanted).norm() / wanted.norm())
    assert error < 2 * ERROR[case.dtype], f"{case}: error {error} of scores times 300"
    assert torch.equal(got_lse == -math.inf, wanted_lse == -math.inf), f"{case}: rows that see nothing"


def odd_values(dims: int, causal: bool) -> None:
    """What is hidden changes no bit, what is not finite shows where it is seen, large scores keep their
    weights."""
    case = Case(dims, causal, 384, 384, heads=2)
    q, k, v = tensors(case)
    out, lse = call(case, q, k, v)
    if causal:
        for bad, (x, y) in itertools.product((math.nan, math.inf, -math.inf), ((k, v), (v, k))):
            x = x.clone()
            x[:, :, 300:] = bad
            got = call(case, q, x, y) if y is v else call(case, q, y, x)
            assert torch.equal(got[0][:, :, :300], out[:, :, :300]), f"{case}: hidden {bad} shows"
            assert torch.equal(got[1][:, :, :300], lse[:, :, :300]), f"{case}: hidden {bad} shows in lse"
    for bad in (math.nan, math.inf, -math.inf):
        x = v.clone()
        x[:, :, 100, 3] = bad
        got, _ = call(case, q, k, x)
        sees = seen(case)[0, 0, :, 100]
        column = got[..., 3]
        there = column.isnan() if math.isnan(bad) else column == bad
        assert bool(there[..., sees].all()), f"{case}: visible {bad} does not show"
        got[..., 3], clean = out[..., 3], out
        got[..., 3] = torch.where(sees, out[..., 3], column)
        assert torch.equal(got, clean), f"{case}: visible {bad} shows elsewhere"
    for size in (30.0, 300.0, 3000.0):
        far = q * size
        got, got_lse = call(case, far, k, v)
        wanted, wanted_lse = right(case, far, k, v)
        error = float((got.double() - wanted).norm() / wanted.norm())
        # a row of one key may have an lse near 0, of products as large as those of others
        off = float(((got_lse.double() - wanted_lse) / wanted_lse.abs().clamp(min=size / 30)).abs().max())
        print(f"{error:.2e} {off:.1e} scores times {size:g}", flush=True)
        assert error < 2 * ERROR[case.dtype], f"{case}: error {error} of scores times {size}"
        assert off < 1e-5, f"{case}: lse off by {off} of scores times {size}"
    got, _ = call(case, q, k, v)
    assert torch.equal(got, out), f"{case}: a call leaves something behind"


def graphs(dims: int, causal: bool) -> None:
    """A captured call, replayed beside others on a second stream."""
    case = Case(dims, causal, 1500, 1500, heads=16, kv_heads=16)
    q, k, v = tensors(case)
    wanted, _ = call(case, q, k, v)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(case, q, k, v)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured, _ = call(case, q, k, v)
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(side):
            other, _ = call(case, q, k, v)
        torch.cuda.synchronize()
        assert torch.equal(captured, wanted) and torch.equal(other, wanted), (
            f"{case}: graph or stream differs"
        )
        captured.zero_()


def mixed(dims: int, causal: bool, launches: int = 10_000) -> None:
    """Calls of all shapes and their gradients in no order, nothing awaited: the bits of the first ones."""
    draw, made = random.Random(0), []
    for case in shapes(dims, causal):
        operands, above = tensors(case), cotangents(case)
        made.append((case, operands, above, call(case, *operands), _gradients_or_none(case, operands, above)))
        print(f"ready: {case}", flush=True)  # compiling is no silence
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(launches):
        case, operands, above, first, gradients = draw.choice(made)
        bad += (call(case, *operands)[0] != first[0]).any()
        if i % 4 == 0 and gradients is not None:
            again = our_gradients(case, operands, *above)
            bad += sum((x != y).any() for x, y in zip(again, gradients, strict=True))
        if i % 1000 == 0:
            print(f"{i} launches, {int(bad)} differ", flush=True)
    assert not int(bad), f"{int(bad)} of {launches} calls differ from the first"


def _gradients_or_none(
    case: Case, operands: list[Tensor], above: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...] | None:
    return our_gradients(case, operands, *above) if case.dims <= configs.MOST_BACKWARD else None


def right_gradients(case: Case, operands: list[Tensor], dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    """Those of q, k and v in float64."""
    exact = [x.detach().double().requires_grad_() for x in operands]
    out, lse = right(case, *exact)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    return torch.autograd.grad((out, lse), exact, (dout.double(), dlse.double()))


def our_gradients(
    case: Case, operands: list[Tensor], dout: Tensor, dlse: Tensor, **more: Any
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in operands]
    return torch.autograd.grad(call(case, *leaves, **more), leaves, (dout, dlse))


def cotangents(case: Case, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Of out (batch, heads, rows, dims) and of lse."""
    draw = torch.Generator("cuda").manual_seed(seed)
    shape = (case.batch, case.heads, case.rows)
    dout = torch.randn(*shape, case.dims, generator=draw, device="cuda").to(case.dtype)
    return dout, torch.randn(shape, generator=draw, device="cuda")


def check_gradients(case: Case) -> None:
    """By name: near float64, and the same bits three times."""
    operands, (dout, dlse) = tensors(case), cotangents(case)
    found, *again = (our_gradients(case, operands, dout, dlse) for _ in range(3))
    assert all(torch.equal(x, y) for other in again for x, y in zip(found, other, strict=True)), (
        f"{case}: bits of gradients differ from call to call"
    )
    hold_gradients(case, found, right_gradients(case, operands, dout, dlse))


def hold_gradients(case: Case, found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for name, x, y in zip("qkv", found, wanted, strict=False):
        assert bool(x.isfinite().all()), f"{case}: d{name} is not finite"
        size = max(float(y.norm()), 1e-3)  # of an only key nothing is left but rounding
        error = float((x.double() - y).norm()) / size
        print(f"{error:.2e} d{name} of {case}", flush=True)
        assert error < 2 * ERROR[case.dtype], f"{case}: error {error} of d{name}"


def gradients(dims: int, causal: bool) -> None:
    """By name for shapes like those of the forward pass, and of a free call, by the rows that it is for."""
    case = Case(dims, causal, 2100, 2100, heads=16, kv_heads=8)
    if dims <= configs.MOST_BACKWARD:
        for shape in shapes(dims, causal):
            check_gradients(shape)
        check_gradients(case._replace(batch=2, kv_heads=2))
    operands = [x.requires_grad_() for x in tensors(case)]
    dout, dlse = cotangents(case)
    with polyflash.watch(quiet=True) as watched:
        out = polyflash.attention(*operands, causal=causal)
        found = torch.autograd.grad(out, operands, dout)
    backward = "gluon" if dims <= configs.MOST_BACKWARD else "triton"
    calls = set(watched.counters()["calls"])
    assert {"gluon/forward", f"{backward}/backward"} == calls - {"triton/statistics"}, f"{case}: {watched}"
    hold_gradients(case, found, right_gradients(case, operands, dout, torch.zeros_like(dlse)))


def bounded_gradients(dims: int, causal: bool) -> None:
    """Those of windows, lengths, starts of requests, caps and slopes, by name."""
    if dims <= configs.MOST_BACKWARD:
        large = Case(dims, causal, 200, 700, softcap=1000.0)
        for case in (*bounded(dims, causal), large, large._replace(alibi=True, dtype=torch.float16)):
            if case.rows > 1:
                check_gradients(case)


def odd_gradients(dims: int, causal: bool) -> None:
    """What is hidden does not show, what is not finite shows where it is seen, and huge scores are right."""
    if dims > configs.MOST_BACKWARD:
        return
    case = Case(dims, causal, 384, 384, heads=4)
    operands, (dout, dlse) = tensors(case), cotangents(case)
    clean = our_gradients(case, operands, dout, dlse)
    for bad, which in itertools.product((math.nan, math.inf, -math.inf), (1, 2)):
        spoiled = [x.clone() for x in operands]
        spoiled[which][:, :, 300] = bad
        dq = our_gradients(case, spoiled, dout, dlse)[0]
        sees = seen(case)[0, 0, :, 300]
        assert not dq[:, :, sees].isfinite().all(-1).any(), f"{case}: visible {bad} does not show"
        hold_gradients(case, [dq[:, :, ~sees]], [clean[0][:, :, ~sees].double()])
    if causal:  # rows 300 and on see no more than keys up to 299
        hidden = case._replace(offset=-84)
        clean = our_gradients(hidden, operands, dout, dlse)
        spoiled = [x.clone() for x in operands]
        for x in spoiled[1:]:
            x[:, :, 300:] = math.nan
        found = our_gradients(hidden, spoiled, dout, dlse)
        hold_gradients(hidden, found, [x.double() for x in clean])
        for x in spoiled[1:]:
            x[:, :, 300:] = 65504.0
        found = our_gradients(hidden, spoiled, dout, dlse)
        assert all(map(torch.equal, found, clean)), f"{case}: hidden numbers show in bits"
    far = [operands[0] * 300, *operands[1:]]
    hold_gradients(case, our_gradients(case, far, dout, dlse), right_gradients(case, far, dout, dlse))
    again = our_gradients(case, operands, dout, dlse)
    clean = our_gradients(case, operands, dout, dlse)
    assert all(map(torch.equal, again, clean)), f"{case}: a call leaves something behind"


def alone(name: str) -> None:
    dims, causal, what = int(name.split("-")[0]), "causal" in name, name.rpartition("-")[2]
    if what in ("shapes", "bounded"):
        for case in (shapes if what == "shapes" else bounded)(dims, causal):
            check(case)
    else:
        {
            "odd": odd_values,
            "hidden": odd_bounds,
            "packed": packed,
            "graphs": graphs,
            "gradients": gradients,
            "spoiled": odd_gradients,
            "limits": bounded_gradients,
            "members": packed_gradients,
            "mixed": mixed,
        }[what](dims, causal)


def contended(name: str, seconds: float, queued: int = 60) -> None:
    """Calls queued ahead, each held to the first."""
    case = Case(int(name.split("-")[0]), "causal" in name, 3840, 3840, batch=2, heads=16, kv_heads=16)
    q, k, v = tensors(case, seed=5)
    dout, dlse = cotangents(case)

    def results() -> Tensor:
        if case.dims > configs.MOST_BACKWARD:
            return call(case, q, k, v)[0]
        return torch.stack((call(case, q, k, v)[0], *our_gradients(case, [q, k, v], dout, dlse)))

    first = results()
    torch.cuda.synchronize()
    began, runs, bad = time.monotonic(), 0, 0
    while time.monotonic() - began < seconds:
        differs = torch.zeros(queued, dtype=torch.int64, device="cuda")
        for i in range(queued):
            differs[i] = (results() != first).sum()
        runs, bad = runs + queued, bad + int((differs > 0).sum())
    print(f"{name}: {runs} runs, {bad} bad", flush=True)
    assert not bad, f"{name}: {bad} of {runs} runs differ"


KINDS = [f"{dims}-{kind}" for dims in (64, 128, 256) for kind in ("full", "causal")]
PADDED = [
    f"{dims}-{kind}" for dims in (40, 80, 96, 192) for kind in ("full", "causal")
]  # narrower than a box
WHAT = (
    "shapes",
    "odd",
    "bounded",
    "hidden",
    "packed",
    "graphs",
    "gradients",
    "spoiled",
    "limits",
    "members",
    "mixed",
)
ALONE = [f"{kind}-{what}" for kind in KINDS for what in WHAT]
ALONE += [f"{kind}-{what}" for kind in PADDED for what in ("shapes", "odd")]


def in_child(
    names: list[str],
    seconds: float,
    width: int,
    more: list[str],
    module: str = "tests.backends.gluon.guarded",
) -> int:
    """Each name in a process of its own, `width` at a time. How many failed or fell silent."""
    waiting, running, failed, folder = list(names), {}, 0, tempfile.mkdtemp()
    while waiting or running:
        while waiting and len(running) < width:
            name = waiting.pop(0)
            command = [sys.executable, "-m", module, "--child", name, *more]
            told = Path(folder, name)
            child = subprocess.Popen(command, stdout=told.open("w"), stderr=subprocess.STDOUT)
            running[name] = child, told, time.monotonic()
        for name, (child, told, began) in list(running.items()):
            late = time.time() - told.stat().st_mtime > seconds
            if child.poll() is None and not late:
                continue
            if late:
                child.kill()
            child.wait()
            said = told.read_text()
            wrong = "HANG" if late else "FAILED" if child.returncode else ""
            failed += bool(wrong)
            tail = said[-1500:] if wrong else said.strip().rpartition("\n")[2]
            print(f"{wrong or 'ok':7}{name} ({time.monotonic() - began:.0f} s) {tail}", flush=True)
            del running[name]
        time.sleep(0.05)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(ALONE[:3])} ...")
    parser.add_argument("--width", type=int, default=4, help="processes at once")
    parser.add_argument("--contend", type=int, default=0, metavar="N", help="N processes at once")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        run: Callable[[], None] = lambda: alone(asked.child)  # noqa: E731
        if asked.contend:
            run = lambda: contended(asked.child, asked.seconds)  # noqa: E731
        run()
        sys.stdout.flush()
        os._exit(0)  # threads of autograd may abort an interpreter that ends
    if asked.contend:
        names = [f"{KINDS[i % len(KINDS)]}-{i}" for i in range(asked.contend)]
        more = ["--contend", "1", "--seconds", str(asked.seconds)]
        return int(in_child(names, SECONDS + asked.seconds, asked.contend, more) > 0)
    return int(in_child(asked.names or ALONE, SECONDS, asked.width, []) > 0)


if __name__ == "__main__":
    sys.exit(main())
