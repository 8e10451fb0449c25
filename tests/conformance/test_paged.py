"""Keys in pages: against the oracle and contiguous keys, whatever the order, size and strides of pages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from tests import device
from tests.catalogue import named, with_dtype, workloads
from tests.conformance.pages import contiguous, hidden_pages, live_pages, padded, repaged
from tests.conformance.rows import DTYPES, NAMES, ROUNDING, Runner, ints
from tests.families import FAMILIES, make
from tests.memory import FILLS, check_guarded
from tests.tolerance import near, same_bits, same_bits_of_strides

PAGED = workloads("paged")
NAMED = tuple(w.name for w in PAGED)
SIZES = (1, 3, 16, 64, 128, 256)
ROTATING = tuple(name for name in FAMILIES if name not in ("normal", "huge", "subnormal"))
Problem = tuple[Tensor, Tensor, Tensor, dict[str, Any]]


def problem(step: Runner, name: str, dtype: str = "float32", **kinds: Any) -> Problem:
    """A workload by name, if the row has one of its kind."""
    workload = with_dtype(named(name), dtype)
    step.skip_unless(workload)
    return make(workload, **kinds)


def equal(a: Any, b: Any, label: str = "") -> None:
    same_bits_of_strides(a.out.contiguous(), b.out.contiguous(), f"{label} out")
    same_bits_of_strides(a.lse.contiguous(), b.lse.contiguous(), f"{label} lse")


@pytest.mark.parametrize("dtype", (*NAMES, "float64"))
@pytest.mark.parametrize("number", range(len(PAGED)), ids=NAMED)
def test_workload(step: Runner, number: int, dtype: str):
    """B-pag-03, B-pag-08, B-emp-06, B-emp-07: over pools and tables full of poison, mixed batches with the
    longest member first, in the middle and last."""
    others = () if dtype == "float64" else (ROTATING[(number + len(dtype)) % len(ROTATING)],)
    for family in ("normal", *others):
        q, k, v, options = problem(step, NAMED[number], dtype, seed=number, family=family)
        got = step.checked(q, k, v, label=f"{NAMED[number]} {dtype} {family}", **options)
        shape = (*q.shape[:2], v.shape[3])
        assert got.out.shape == shape and got.lse.shape == (q.shape[1], q.shape[0])


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("name", NAMED)
def test_M26_pages_have_the_bits_of_contiguous_keys(step: Runner, name: str, dtype: str):
    """At every page size and order: tiles are gathered before anything is computed."""
    q, k, v, options = problem(step, name, dtype, seed=1)
    got = step(q, k, v, **options)
    flat = contiguous(q, k, v, options) if "cu_seqlens_q" in options else padded(q, k, v, options)
    want = step(*flat[:3], **flat[3])
    if "cu_seqlens_q" not in options:
        want = want._replace(out=want.out.squeeze(2), lse=want.lse.squeeze(2).transpose(0, 1))
    equal(got, want, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ("paged-long", "paged-16", "paged-mixed-16", "paged-mixed-window"))
def test_M26_any_page_size_and_order(step: Runner, name: str, dtype: torch.dtype):
    """B-pag-04, PF9: the same requests in other pages; a larger pool, a table with more columns."""
    q, k, v, options = problem(step, name, str(dtype).removeprefix("torch."))
    want = step(q, k, v, **options)
    for page_size in SIZES:
        for seed in (1, 2):
            equal(step(*(p := repaged(q, k, v, options, page_size, seed))[:3], **p[3]), want, f"{page_size}")
    wider = [torch.cat((x, torch.full_like(x, math.nan))) for x in (k, v)]
    table = torch.cat((options["page_table"], torch.full_like(options["page_table"], -7)), 1)
    equal(step(q, *wider, **{**options, "page_table": table}), want, "a larger pool")


def test_B_pag_16_another_table_is_another_result(step: Runner):
    """The table is not ignored: the pages of two requests exchanged exchange what their rows see."""
    q, k, v, options = problem(step, "paged-16")
    got = step(q, k, v, **options)
    order = torch.tensor((3, 1, 2, 0))
    turned = {**options, "page_table": options["page_table"][order], "kv_lens": options["kv_lens"][order]}
    other = step(q, k, v, **turned)
    assert not torch.equal(other.out[0], got.out[0]) and not torch.equal(other.out[3], got.out[3])
    equal(step(q[order], k, v, **turned), got._replace(out=got.out[order], lse=got.lse[:, order]))


def test_shared_pages(step: Runner):
    """PF3, PF4: a prefix shared by requests, a page twice in one, one page for all keys."""
    q, k, v, options = problem(step, "paged-16")
    table, lens = options["page_table"].clone(), ints(300, 260, 40, 193)
    table[1, :16], table[1, 16] = table[0, :16], table[3, 0]
    table[2, :3] = table[0, 3]
    for causal in (False, True):
        own = {"page_table": table, "kv_lens": lens, "causal": causal}
        step.checked(q, k, v, label="shared", **own)
        step.checked(q, k, v, label="one page", **{**own, "page_table": table[:1, :1].expand_as(table)})
    q, k, v, options = problem(step, "paged-mixed-16")
    table, lens = options["page_table"].clone(), ints(130, 120, 20, 1, 128, 0, 257, 64)
    table[1, :8], table[7, :4] = table[0, :8], table[4, :4]
    step.checked(q, k, v, label="mixed", **{**options, "page_table": table, "kv_lens": lens})


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("name", ("paged-16", "paged-3", "paged-dim-v", "paged-mixed-16", "paged-mixed-3"))
def test_pools_and_tables_of_any_strides(step: Runner, name: str, dtype: str):
    """B-pag-20 without scales, PF7, PF9: fused pools, heads before slots, padded pages, slots and channels,
    two channels apart; tables transposed, with a stride of 2, of a row for all."""
    q, k, v, options = problem(step, name, dtype)
    want = step(q, k, v, **options)

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def strided(x: Tensor) -> Tensor:
        return torch.stack((x, x * 0 + 3), -1)[..., 0]

    def wide(x: Tensor, dim: int) -> Tensor:
        return torch.cat((x, torch.full_like(x, math.nan)), dim).narrow(dim, 0, x.shape[dim])

    pools = [
        (heads_first(k), v), (k, heads_first(v)), (strided(k), strided(v)), (strided(k), v),
        *((wide(k, dim), wide(v, dim)) for dim in (1, 2, 3)),
        torch.cat((torch.zeros(5, dtype=k.dtype), k.flatten()))[5:].view(k.shape),
    ]  # fmt: skip
    pools[-1] = (pools[-1], v)
    if k.shape == v.shape:
        for dim in (0, 1, 2, 3):
            pools.append(torch.stack((k, v), dim).unbind(dim))
    for at, (a, b) in enumerate(pools):
        equal(step(q, a, b, **options), want, f"pools {at}")
    table = options["page_table"]
    tables = (table.mT.contiguous().mT, torch.stack((table * 0 - 1, table), -1)[..., 1], table.repeat(1, 3))
    for at, other in enumerate(tables):
        equal(step(q, k, v, **{**options, "page_table": other}), want, f"table {at}")
    equal(step(strided(q), k, v, **options), want, "q")


@pytest.mark.parametrize("number", range(len(PAGED)), ids=NAMED)
def test_guard_bands(step: Runner, number: int):
    """B-pag-01, B-pag-02: nothing beside pools, table, lengths, out and lse is read or written."""
    check_guarded(step, *problem(step, NAMED[number], NAMES[number % 3], seed=1))


@pytest.mark.parametrize("number", range(len(PAGED)), ids=NAMED)
def test_invisible_bits(step: Runner, number: int):
    """P5, PF8: free pages, tails, keys outside windows and before kv_starts, rows of nobody."""
    q, k, v, options = problem(step, NAMED[number], NAMES[(number + 1) % 3], seed=2)
    want = step(q, k, v, **options)
    for fill in FILLS:
        hidden = hidden_pages(q, k, v, options, fill)
        got = step(*hidden[:3], **hidden[3])
        rows = int(options["cu_seqlens_q"][-1]) if "cu_seqlens_q" in options else len(q)
        same_bits(got.out[:rows].contiguous(), want.out[:rows].contiguous(), f"{fill} out")
        same_bits(got.lse.contiguous(), want.lse.contiguous(), f"{fill} lse")
        assert (got.out[rows:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_nonfinite_values(step: Runner, dtype: torch.dtype):
    """P6: in a page that one request has, they reach that request alone; in a shared one, both."""
    q, k, v, options = problem(step, "paged-16", str(dtype).removeprefix("torch."))
    clean = step(q, k, v, **options)
    pages = live_pages(options, 16)
    for value, test in ((math.nan, torch.isnan), (math.inf, torch.isposinf), (-math.inf, torch.isneginf)):
        for request, column, slot in ((0, 0, 0), (0, 18, 11), (3, 12, 0)):
            spoiled = v.clone()
            spoiled[pages[request][0][column], slot, 1, 5] = value
            got = step(q, k, spoiled, **options)
            hit = torch.zeros(got.out.shape, dtype=torch.bool)
            hit[request, 2:, 5] = True
            assert test(got.out[hit]).all(), f"{value}"
            others = torch.arange(4) != request
            same_bits(got.out[others], clean.out[others])
            near(got.out[~hit], clean.out[~hit], ROUNDING[dtype])
    spoiled = k.clone()
    spoiled[pages[3][0][2], 5, 0, 1] = math.nan
    got = step(q, spoiled, v, **options)
    assert got.out[3, :2].isnan().all() and got.lse[:2, 3].isnan().all()
    same_bits(got.out[:3], clean.out[:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_requests_without_keys_or_rows(step: Runner, dtype: torch.dtype):
    """P3, B-msk-17, B-emp-06: no live key, no row, nothing at all; into memory that held NaN."""
    workload = with_dtype(named("paged-sinks"), str(dtype).removeprefix("torch."))
    q, k, v, options = make(replace(workload, kv_lens=(300,) * 4))
    sinks = options.pop("sinks")
    for lens in ((0, 300, 0, 1), (0, 0, 0, 0)):
        for extra in ({}, {"causal": True}, {"sinks": sinks}):
            out = torch.full_like(q, math.nan)
            own = {**options, "kv_lens": ints(*lens), **extra}
            table = own["page_table"].clone()
            table[torch.tensor(lens) == 0] = -1
            got = step(q, k, v, out=out, **{**own, "page_table": table})
            assert (out[0] == 0).all() and not out.isnan().any() and got.out is out
            step.checked(q, k, v, label=f"{lens}", **own)
    none = step(q[:0], k, v, page_table=options["page_table"][:0], kv_lens=ints())
    assert none.out.shape == (0, 4, 64) and none.lse.shape == (4, 0)
    got = step(q, k[:0], v[:0], page_table=options["page_table"][:, :0], kv_lens=ints(0, 0, 0, 0))
    assert (got.out == 0).all() and (got.lse == -math.inf).all()
    if step.row.phase.value == "forward":
        for bounds in ((0, 0, 0, 0, 0), (0, 0, 4, 4, 4), (0, 1, 1, 1, 3)):
            own = {**options, "cu_seqlens_q": ints(*bounds), "causal": True}
            got = step.checked(q, k, v, label=f"{bounds}", **own)
            assert (got.out[bounds[-1] :] == 0).all() and (got.lse[:, bounds[-1] :] == -math.inf).all()


def test_any_out(step: Runner):
    for name in ("paged-dim-v", "paged-mixed-everything"):
        for dtype in NAMES:
            workload = with_dtype(named(name), dtype)
            if workload.members and step.row.phase.value == "decode":
                continue
            q, k, v, options = make(workload)
            want = step(q, k, v, **options)
            rows, heads, dim = want.out.shape
            wide = torch.full((rows, heads + 1, dim + 3), 7.0, dtype=q.dtype)
            turned = torch.full((dim, heads, rows), 7.0, dtype=q.dtype)
            for out in (wide[:, :heads, :dim], turned.permute(2, 1, 0), wide[:, 1:, 3:]):
                wide.fill_(7)
                equal(got := step(q, k, v, out=out, **options), want)
                assert got.out is out
            assert (wide[:, 0] == 7).all() and (wide[..., :3] == 7).all()


def test_checked_tables(step: Runner):
    """B-pag-01, B-pag-15, PF1, PF2, PF5, PF6: on a CPU contents are checked with and without checked=True,
    before anything is written; exactly at capacity works."""
    q, k, v, options = problem(step, "paged-16")
    options = {**options, "page_table": options["page_table"][:, :19]}  # 304 keys
    full = step(q, k, v, **{**options, "kv_lens": options["kv_lens"]})
    equal(step(q, k, v, **options, checked=True), full)
    wrong: list[tuple[str, dict[str, Any]]] = []
    for page in (-1, len(k), 2**31 - 1, -(2**31)):
        for request, column in ((0, 0), (0, 18), (2, 0), (3, 12)):
            table = options["page_table"].clone()
            table[request, column] = page
            wrong.append((f"page_table.*{page}.*request {request} in column {column}", {"page_table": table}))
    for lens in ((305, 0, 1, 193), (300, 0, -1, 193), (2**31 - 1, 0, 1, 1), (300, 0, 1, -(2**31))):
        wrong.append(("kv_lens", {"kv_lens": ints(*lens)}))
    wrong.append(("kv_starts", {"kv_starts": ints(0, -1, 0, 0)}))
    for words, change in wrong:
        out = torch.full_like(q, 7.0)
        for checked in device.CONTENTS:
            with pytest.raises(polyflash.SpecError, match=words):
                step(q, k, v, out=out, checked=checked, **{**options, **change})
        assert (out == 7).all()
    whole = {"kv_lens": ints(304, 0, 1, 193)}  # the last page to its last slot
    table = options["page_table"].clone()
    table[0, 18] = 0
    step.checked(q, k.nan_to_num(1.0), v.nan_to_num(1.0), **{**options, **whole, "page_table": table})


def test_pages_that_no_row_sees_are_not_looked_at(step: Runner):
    """Pages before a window or kv_starts, and beyond the live keys, may be anything: a cache that slides
    gives its old pages back."""
    q, k, v, options = problem(step, "paged-window")
    want = step(q, k, v, **options)
    table = options["page_table"].clone()
    for request, n in enumerate(options["kv_lens"].tolist()):
        table[request, : max(0, n - 1 - 100) // 16] = -1
        table[request, -(-n // 16) :] = 2**31 - 1
    assert (table[0] == -1).sum() == 12
    equal(step(q, k, v, **{**options, "page_table": table}), want)
    q, k, v, options = problem(step, "paged-starts")
    want = step(q, k, v, **options)
    table = options["page_table"].clone()
    for request, start in enumerate(options["kv_starts"].tolist()):
        table[request, : start // 16] = -9
    equal(step(q, k, v, **{**options, "page_table": table}), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", ((40, 80, 150), (1, 2, 3, 150), (17, 64, 65, 149, 150), (150,)), ids=str)
def test_M24_chunked_prefill_is_prefill(run: Runner, cuts: tuple[int, ...], dtype: torch.dtype):
    """B-cau-06: chunks of two requests over growing pages, then token by token, against the whole prefill."""
    q, k, v, options = make(with_dtype(named("paged-one"), str(dtype).removeprefix("torch.")))
    _, k, v, options = repaged(q, k, v, options, 16)
    table = options["page_table"]
    rows = torch.randn(150, 4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    own = {"page_table": table, "causal": True}
    whole = run(rows, k, v, cu_seqlens_q=ints(0, 150), **own, kv_lens=ints(150))
    for window in (None, (60, None)):
        own["window"] = window
        whole = run(rows, k, v, cu_seqlens_q=ints(0, 150), **own, kv_lens=ints(150))
        start = 0
        for end in cuts:
            pair = torch.cat((rows[start:end], rows[start:end]))
            bounds, lens = ints(0, end - start, 2 * (end - start)), ints(end, end)
            got = run(
                pair, k, v, cu_seqlens_q=bounds, **{**own, "page_table": table.repeat(2, 1)}, kv_lens=lens
            )
            want = whole.out[start:end]
            near(got.out[: end - start], want, ROUNDING[dtype], f"rows {start} to {end}")
            same_bits(got.out[: end - start], got.out[end - start :])
            start = end
        for at in (0, 1, 15, 16, 149):
            one = run(rows[at : at + 1], k, v, **own, kv_lens=ints(at + 1))
            near(one.out[0], whole.out[at], ROUNDING[dtype], f"row {at}")
