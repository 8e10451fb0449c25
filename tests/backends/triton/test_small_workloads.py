"""Every problem of the catalogue on every Triton row, a quarter as long and with fewer channels, as Triton's
interpreter takes milliseconds per tile. The whole sizes are the conformance suite's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import polyflash
from polyflash import backends
from polyflash.spec import Feature, Phase
from polyflash.workloads import Workload, make
from tests.catalogue import named, with_dtype, workloads
from tests.chosen import chosen
from tests.conformance.gradients import attend, checked
from tests.conformance.rows import Runner
from tests.memory import check_guarded, check_hidden
from tests.tolerance import near

ROWS = {row.phase: Runner(row) for row in backends.TABLE if row.backend == "triton"}
HALF = ("bfloat16", "float16")  # each takes its turn where every dtype would take too long
EVERY = 6


def quarter(n: int) -> int:
    """What is short stays, and so does the order of lengths."""
    return n if -8 <= n <= 8 else (n + 3) // 4 + 6


def narrow(channels: int) -> int:
    """Up to 16 and from 512 on as they are; else one block of channels or two, the last one ragged."""
    return channels if channels <= 16 or channels >= 512 else 24 if channels <= 64 else 40


def small(workload: Workload) -> Workload:
    w = workload
    members = tuple((quarter(rows), quarter(keys)) for rows, keys in w.members)
    tail = w.seqlen_q - sum(rows for rows, _ in w.members)
    rows, keys = quarter(w.seqlen_q), quarter(w.seqlen_k)
    if members:
        rows = sum(rows for rows, _ in members) + tail
        keys = max(n for _, n in members) if w.page_size else sum(n for _, n in members) + tail
    lens, starts = (None if x is None else tuple(map(quarter, x)) for x in (w.kv_lens, w.kv_starts))
    if w.page_size and not members:
        keys = max(lens or (keys,))
    window = w.window and tuple(None if side is None else quarter(side) for side in w.window)
    offset = tuple(map(quarter, w.offset)) if isinstance(w.offset, tuple) else w.offset
    return replace(
        w,
        seqlen_q=rows,
        seqlen_k=keys,
        members=members,
        kv_lens=lens,
        kv_starts=starts,
        window=window,
        offset=quarter(offset) if isinstance(offset, int) else offset,
        head_dim=narrow(w.head_dim),
        head_dim_v=narrow(w.head_dim_v) - 8 * (w.head_dim_v < w.head_dim)
        if w.head_dim_v > 16
        else w.head_dim_v,
        interval_rows=quarter(w.interval_rows),
        page_size=quarter(w.page_size),
    )


def cases(*tags: str, half: bool = True) -> list[Any]:
    """Each problem in float32, some in a half precision too. By default those run that need a feature which
    none before them needed."""
    found = []
    for tag in tags:
        seen: set[Feature] = set()
        for turn, w in enumerate(workloads(tag)):
            fresh = not w.features <= seen or not turn
            seen.update(w.features)
            dtypes = ("float32", HALF[turn // EVERY % 2]) if half and turn % EVERY == 0 else ("float32",)
            marks = () if fresh else (pytest.mark.slow,)
            found += [pytest.param(w.name, dtype, id=f"{w.name}-{dtype}", marks=marks) for dtype in dtypes]
    return found


def run(phase: Phase, name: str, dtype: str) -> None:
    workload = with_dtype(small(named(name)), dtype)
    q, k, v, options = make(workload, seed=len(name))
    ROWS[phase].checked(q, k, v, label=f"{name} {dtype}", **options)


@pytest.mark.parametrize(("name", "dtype"), cases("ci", "varlen", "paged"))
def test_forward(name: str, dtype: str):
    run(Phase.FORWARD, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), cases("decode"))
def test_decode(name: str, dtype: str):
    run(Phase.DECODE, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), cases("paged", half=False))
def test_decode_of_pages(name: str, dtype: str):
    if named(name).members:
        pytest.skip("packed members are the forward row's")
    run(Phase.DECODE, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), cases("ci", "varlen"))
def test_gradients(name: str, dtype: str):
    q, k, v, options = make(with_dtype(small(named(name)), dtype), seed=len(name))
    checked(q, k, v, backend="triton", label=f"{name} {dtype}", **options)


@pytest.mark.parametrize(("name", "dtype"), cases("ci", half=False))
def test_statistics(name: str, dtype: str):
    """Against the torch row."""
    q, k, _, options = make(small(named(name)), seed=len(name))
    lse = polyflash.attention(q, k, k, return_lse=True, backend="torch", **options).lse
    options.pop("sinks", None)  # they are in the lse
    sums = [polyflash.column_sums(q, k, lse, backend=b, **options) for b in ("triton", "torch")]
    near(*sums, 2e-6, f"{name}: column sums")
    stats = [polyflash.row_stats(q, k, lse, backend=b, **options) for b in ("triton", "torch")]
    for ours, theirs, what in zip(*stats, ("entropy", "largest score"), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=2e-5, atol=2e-5, msg=lambda m, w=what: f"{name} {w}: {m}"
        )


@pytest.mark.parametrize(
    "name",
    chosen(["everything", "packed-everything", "intervals-heads", "mask-dense", "starts"], "intervals-heads"),
)
def test_invisible_bits(name: str):
    q, k, v, options = make(small(named(name)), seed=1)
    check_hidden(ROWS[Phase.FORWARD], q, k, v, options, fills=("nan", "bits"))


@pytest.mark.parametrize("name", ["everything", "dim-v-larger"])
def test_guard_bands(name: str):
    q, k, v, options = make(small(named(name)), seed=1)
    check_guarded(ROWS[Phase.FORWARD], q, k, v, options)


@pytest.mark.parametrize("name", ["self", "everything", "packed-causal"])
def test_dropout(name: str):
    """The weights that the torch row drops, and their gradients."""
    q, k, v, options = make(small(named(name)), seed=2)
    options |= {"dropout_p": 0.3, "dropout_seed": 2**40 + 3}
    got = ROWS[Phase.FORWARD](q, k, v, **options)
    want = attend(q, k, v, backend="torch", **options)
    near(got.out, want.out, 2e-6, name)
    checked(q, k, v, backend="triton", label=name, **options)


@pytest.mark.parametrize("tag", ["ci", "varlen", "decode", "paged"])
def test_small_problems_keep_what_the_whole_ones_are_about(tag: str):
    for whole in workloads(tag):
        w = small(whole)
        assert w.features == whole.features and w.requests == whole.requests, w.name
        assert w.seqlen_q <= whole.seqlen_q + 6 and w.seqlen_k <= whole.seqlen_k + 6, w.name
        assert all(n <= w.seqlen_k or w.members for n in w.kv_lens or ()), w.name
