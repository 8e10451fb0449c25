"""attention_paged as users meet it: shapes, refusals that teach, what is read of a table, out=, compilation,
routes and plans. Its numbers are in tests/conformance."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from polyflash import (
    AttentionOutput,
    SpecError,
    UnsupportedError,
    attention,
    attention_paged,
    backends,
    explain,
    merge,
    repeats,
    torch_ops,
    use_backend,
    validate,
)
from polyflash.mask import row_interval
from polyflash.spec import Arguments, Feature, Phase
from tests.references import paged_reference
from tests.rows_here import HERE, needs_cpu_engine

INT = torch.int32
CU = torch.tensor([0, 2, 2, 7], dtype=INT)


def ints(*values):
    return torch.tensor(values, dtype=INT)


def problem(page_size=3, lens=(8, 0, 14), max_pages=6, num_pages=20, rows=3, dtype=torch.float32, garbage=-7):
    """q (rows, 4, 16), pools of 2 heads, a shuffled table with garbage beyond live lengths, and lengths."""
    torch.manual_seed(page_size + sum(lens))
    q = torch.randn(rows, 4, 16).to(dtype)
    k, v = (torch.randn(num_pages, page_size, 2, d).to(dtype) for d in (16, 24))
    table = torch.full((len(lens), max_pages), garbage, dtype=INT)
    for b, n in enumerate(lens):
        used = -(-n // page_size)
        table[b, :used] = torch.randperm(num_pages)[:used].int()
    return q, k, v, table, ints(*lens)


def check(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.out.double(), want.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.lse.double(), want.lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("packed", [False, True])
def test_results_and_their_shapes(packed, backend):
    cu = CU if packed else None
    q, k, v, table, lens = problem(rows=9 if packed else 3)
    options = {"cu_seqlens_q": cu, "causal": True, "sinks": torch.randn(4), "softcap": 3.0}
    got = attention_paged(q, k, v, table, lens, return_lse=True, backend=backend, **options)
    assert isinstance(got, AttentionOutput)
    assert got.out.shape == (*q.shape[:2], 24) and got.lse.shape == (4, q.shape[0])
    want = paged_reference(q, k, v, table, lens, **options)
    if packed:  # beyond the last bound, where no request has a sink
        assert (got.out[7:] == 0).all() and (got.lse[:, 7:] == -torch.inf).all()
    check(got, want)
    alone = attention_paged(q, k, v, table, lens, backend=backend, **options)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, got.out)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(
    "options",
    [
        {"alibi_slopes": torch.tensor([0.5, 0.1, 0.0, 2.0])},
        {"alibi_slopes": torch.rand(3, 4)},
        {"kv_starts": ints(2, 0, 7), "window": (3, None), "causal": True},
        {"q_offset": 5, "causal": True},
        {"q_offset": ints(3, 0, 20), "window": (2, 4)},
        {"causal": "top_left", "scale": -0.3},
    ],
)
def test_everything_counts_from_a_requests_first_key(options, backend):
    """As for contiguous keys: the pages of a request gathered, with kv_lens."""
    q, k, v, table, lens = problem(garbage=3)
    got = attention_paged(q, k, v, table, lens, return_lse=True, backend=backend, **options)
    keys, values = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k, v))
    want = attention(q[:, :, None], keys, values, kv_lens=lens, return_lse=True, **options)
    torch.testing.assert_close(got.out, want.out[:, :, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse, want.lse[:, :, 0].T, rtol=1e-5, atol=1e-5)


def test_results_of_two_tables_merge():
    """A prefix that all requests share, and keys of their own."""
    q, k, v, table, lens = problem(lens=(8, 4, 14))
    shared = ints(19, 2, 7)[None]
    prefix = attention_paged(q, k, v, shared, ints(9), cu_seqlens_q=ints(0, 3), return_lse=True)
    own = attention_paged(q, k, v, table, lens, return_lse=True)
    got = merge(*prefix, *own, layout="thd")
    whole = torch.cat([shared.expand(3, 3), table], 1)
    check(got, paged_reference(q, k, v, whole, lens + 9))


@pytest.mark.parametrize("backend", HERE)
def test_pools_of_any_strides_are_read_where_they_are(backend):
    """Both in one tensor, heads before slots, channels in front, pages apart; a transposed q."""
    q, k, v, table, lens = problem(page_size=4)
    v = v[..., :16].contiguous()
    want = attention_paged(q, k, v, table, lens, backend=backend)
    both = torch.stack((k, v), 1)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    channels_first = [x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in (k, v)]
    apart = [torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, :4] for x in (k, v)]
    for pools in (both.unbind(1), heads_first, channels_first, apart):
        assert not pools[0].is_contiguous()
        assert torch.equal(attention_paged(q, *pools, table, lens, backend=backend), want)
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attention_paged(turned, k, v, table, lens, backend=backend), want)
    columns = torch.stack([table, table * 0], 2)[:, :, 0]
    assert torch.equal(attention_paged(q, k, v, columns, lens, backend=backend), want)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", HERE)
def test_out_is_written_in_place(packed, backend):
    cu = CU if packed else None
    q, k, v, table, lens = problem(rows=9 if packed else 3)
    want = attention_paged(q, k, v, table, lens, cu_seqlens_q=cu, return_lse=True, backend=backend)
    for place in (torch.full(want.out.shape, torch.nan), torch.empty(q.shape[0], 4, 48)[..., ::2]):
        got = attention_paged(
            q, k, v, table, lens, cu_seqlens_q=cu, out=place, return_lse=True, backend=backend
        )
        assert got.out is place and torch.equal(place, want.out) and torch.equal(got.lse, want.lse)
    with pytest.raises(SpecError, match="out: got"):
        attention_paged(q, k, v, table, lens, cu_seqlens_q=cu, out=torch.empty(2, 4, 24))
    with pytest.raises(SpecError, match="out: got 4 dimensions"):
        attention_paged(q, k, v, table, lens, cu_seqlens_q=cu, out=torch.empty(1, 3, 4, 24))


def test_stride_order_of_q_is_that_of_the_result():
    q, k, v, table, lens = problem(rows=9)
    for order in ((0, 1, 2), (1, 0, 2)):
        shuffled = q.permute(order).contiguous().permute(order)
        for rows, cu in ((shuffled, CU), (shuffled[:3], None)):
            out = attention_paged(rows, k, v, table, lens, cu_seqlens_q=cu)
            like = torch.empty(*rows.shape[:2], 24).permute(order).contiguous().permute(order)
            assert out.stride() == like.stride()


@pytest.mark.parametrize("backend", HERE)
def test_nothing_to_read(backend):
    """No request, no row, no page, no column, no live key: right shapes, empty rows."""
    q, k, v, table, lens = problem()
    sinks = torch.randn(4)
    none = lens * 0
    cases = {
        "no request": (q[:0], k, v, table[:0], lens[:0], None),
        "no page": (q, k[:0], v[:0], table, none, None),
        "no column": (q, k, v, table[:, :0], none, None),
        "no live key": (q, k, v, table, none, None),
        "no row": (q[:0], k, v, table, lens, ints(0, 0, 0, 0)),
        "no heads": (q[:, :0], k[:, :, :0], v[:, :, :0], table, lens, None),
    }
    for name, (*operands, cu) in cases.items():
        heads = operands[0].shape[1]
        out, lse = attention_paged(
            *operands, cu_seqlens_q=cu, sinks=sinks[:heads], return_lse=True, backend=backend
        )
        assert out.shape == (*operands[0].shape[:2], 24), name
        assert lse.shape == (heads, operands[0].shape[0]) and not out.any(), name
        assert torch.equal(lse, sinks[:heads, None].expand_as(lse)), name


def test_no_kernel_meets_a_zero_size(monkeypatch):
    q, k, v, table, lens = problem()
    for operands in ((q, k[:0], v[:0], table, lens * 0), (q, k, v, table[:, :0], lens * 0)):
        attention_paged(*operands)
        for launch in torch_ops._routes.values():
            monkeypatch.setattr(launch, "run", None)
        assert not attention_paged(*operands).any()


REFUSED = [
    ("a batch of rows", {"q": torch.ones(3, 1, 4, 16)}, r"q: got 4 dimensions \(3, 1, 4, 16\).*cu_seqlens_q"),
    ("q is no tensor", {"q": None}, "q: got None, wanted a torch.Tensor"),
    ("more rows than requests", {"q": torch.ones(9, 4, 16)}, "q rows: got 9, wanted 3, one token per"),
    ("pool of three dimensions", {"k_pages": torch.ones(20, 2, 16)}, r"k_pages: got 3 .*page_size"),
    ("both pools in one", {"v_pages": torch.ones(20, 2, 3, 2, 16)}, r"v_pages: got 5 .*select\(\)"),
    ("pages of v", {"v_pages": torch.ones(19, 3, 2, 24)}, "v pages: got 19, wanted 20"),
    ("page size of v", {"v_pages": torch.ones(20, 4, 2, 24)}, "v page_size: got 4, wanted 3"),
    ("heads of v", {"v_pages": torch.ones(20, 3, 1, 24)}, "v heads: got 1, wanted 2"),
    ("head_dim of k", {"k_pages": torch.ones(20, 3, 2, 15)}, "k head_dim: got 15, wanted 16"),
    ("dtype of the pool", {"k_pages": torch.ones(20, 3, 2, 16).half()}, "k dtype: got torch.float16"),
    ("ratio of heads", {"q": torch.ones(3, 3, 16)}, "3 query heads over 2"),
    ("page size 0", {n: torch.ones(20, 0, 2, 16) for n in ("k_pages", "v_pages")}, "page_size: got 0"),
    ("int64 table", {"page_table": torch.zeros(3, 6).long()}, r"page_table: got torch.int64.*\.to\(torch"),
    ("flat table", {"page_table": ints(1, 2, 3)}, r"page_table: got torch.int32 \(3,\), wanted int32 tensor"),
    ("table as a list", {"page_table": [[0]] * 3}, "page_table: got list of 3"),
    ("table of another batch", {"page_table": torch.zeros(2, 6, dtype=INT)}, "wanted 2, one token per"),
    ("table elsewhere", {"page_table": torch.zeros(3, 6, dtype=INT).to("meta")}, "page_table device: got"),
    ("no lengths", {"kv_lens": None}, "kv_lens: got None, wanted one beside page_table"),
    ("int16 lengths", {"kv_lens": torch.zeros(3).short()}, r"kv_lens: got torch.int16.*\.to\(torch.int32\)"),
    ("lengths of another batch", {"kv_lens": ints(1)}, r"kv_lens: got \(1,\)"),
    ("a length beyond the table", {"kv_lens": ints(8, 0, 19)}, r"kv_lens: got 19 for request 2.*\[0, 18\]"),
    ("a negative length", {"kv_lens": ints(8, -1, 9)}, "kv_lens: got -1 for request 1"),
    ("a start beyond the table", {"kv_starts": ints(8, 0, 19)}, "kv_starts: got 19 for request 2"),
    ("max_seqlen_q alone", {"max_seqlen_q": 1}, "max_seqlen_q: got no cu_seqlens_q"),
    ("members of another number", {"cu_seqlens_q": ints(0, 3)}, "page_table rows: got 3, wanted 1.*cu_seq"),
    ("members beyond q", {"cu_seqlens_q": ints(0, 1, 2, 4)}, "cu_seqlens_q: got 4 last, wanted at most 3"),
    ("members as int16", {"cu_seqlens_q": CU.short()}, "cu_seqlens_q: got torch.int16"),
    ("max_seqlen_q too low", {"cu_seqlens_q": ints(0, 0, 0, 3), "max_seqlen_q": 2}, "max_seqlen_q: got 2"),
    ("a window below 0", {"window": (-1, 0)}, "Use None for unbounded"),
    ("backend", {"backend": "gpu"}, "one of cpu, gluon, triton, webgpu, metal, torch"),
]  # fmt: skip


@pytest.mark.parametrize("words", REFUSED, ids=lambda case: case[0])
def test_refusals_name_what_to_change(words):
    _, change, match = words
    given = dict(zip(("q", "k_pages", "v_pages", "page_table", "kv_lens"), problem(), strict=True))
    attention_paged(**given)
    with pytest.raises(SpecError, match=match):
        attention_paged(**{**given, **change})


@pytest.mark.parametrize("name", ["mask", "bias", "segments", "intervals", "row_bounds", "dropout"])
def test_operands_without_a_meaning_over_pages_are_refused(name):
    """`attention_paged` has no such argument; the op and explain() refuse them by name."""
    q, k, v, table, lens = problem()
    options = {
        "mask": {"mask": torch.ones(18, dtype=torch.bool)},
        "bias": {"bias": torch.zeros(18)},
        "segments": {"q_segments": ints(0, 0, 0)[:, None], "k_segments": torch.zeros(3, 18, dtype=INT)},
        "intervals": {"intervals": torch.zeros(1, 1, 1, 1, 2, dtype=INT), "interval_rows": 1},
        "row_bounds": {"row_bounds": ints(0, 18)[None]},
        "dropout": {"dropout_p": 0.5, "dropout_seed": torch.tensor(3)},
    }[name]
    args = Arguments(page_table=table, kv_lens=lens, **options)
    with pytest.raises(SpecError, match=r"beside page_table"):
        torch_ops.call(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), args)
    if name in ("mask", "bias"):
        with pytest.raises(SpecError, match=f"{name}: got one, wanted none beside page_table"):
            explain(q, k, v, page_table=table, kv_lens=lens, **options)


class TestTables:
    """Which entries are looked at, and what is said of a wrong one."""

    @pytest.mark.parametrize("bad", [-1, 20, 2**31 - 1, -(2**31)])
    def test_a_page_outside_the_pool_is_named(self, bad):
        q, k, v, table, lens = problem()
        for request, column in ((0, 0), (0, 2), (2, 4)):
            wrong = table.clone()
            wrong[request, column] = bad
            words = rf"page_table: got page {bad} for request {request} in column {column}, .*\[0, 20\)"
            with pytest.raises(SpecError, match=words):
                attention_paged(q, k, v, wrong, lens)
            wrong = wrong.T.contiguous().T
            with pytest.raises(SpecError, match=words):
                attention_paged(q, k, v, wrong, lens, out=torch.empty(3, 4, 24), checked=True)

    def test_nothing_runs_and_nothing_is_written_before_a_refusal(self, monkeypatch):
        q, k, v, table, lens = problem()
        attention_paged(q, k, v, table, lens)
        place = torch.full((3, 4, 24), 5.0)
        for launch in torch_ops._routes.values():
            monkeypatch.setattr(launch, "run", None)
        with pytest.raises(SpecError, match="request 0"):
            attention_paged(q, k, v, table - 100, lens, out=place)
        assert (place == 5.0).all()

    def test_an_empty_pool_has_no_page(self):
        q, k, v, table, lens = problem()
        with pytest.raises(SpecError, match=r"pages in \[0, 0\)"):
            attention_paged(q, k[:0], v[:0], table, lens)

    @pytest.mark.parametrize("seed", range(40))
    def test_entries_of_pages_that_a_row_sees_a_key_of_are_needed_and_no_others(self, seed):
        """Against visibility, pair by pair: one wrong entry at a time."""
        generator = torch.Generator().manual_seed(seed)
        draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
        page_size, max_pages, batch = draw(1, 6), draw(1, 6), draw(1, 4)
        keys = page_size * max_pages
        lens = [draw(0, keys + 1) for _ in range(batch)]
        starts = [draw(0, keys + 1) if draw(0, 2) else 0 for _ in range(batch)]
        rows = [draw(0, 5) for _ in range(batch)] if draw(0, 2) else [1] * batch
        causal, left, right = bool(draw(0, 2)), draw(-3, 9), draw(-3, 9)
        window = (left if left >= 0 else None, right if right >= 0 else None)
        offset = draw(-9, keys + 9) if draw(0, 2) else None
        args = Arguments(
            causal=causal, window_left=window[0], window_right=window[1], kv_lens=ints(*lens),
            kv_starts=ints(*starts) if any(starts) else None,
            offset=offset if draw(0, 2) else None,
            cu_seqlens_q=torch.tensor([0, *rows]).cumsum(0).to(INT) if rows != [1] * batch else None,
        )  # fmt: skip
        if args.offset is None and offset is not None:
            args = args._replace(q_offset=ints(*[offset] * batch))
        pool = torch.empty(4, 1, page_size, 1)
        for request, column in itertools.product(range(batch), range(max_pages)):
            table = torch.zeros(batch, max_pages, dtype=INT)
            table[request, column] = 4 if draw(0, 2) else -1
            seen = set()
            for i in range(rows[request]):
                at = lens[request] - rows[request] if offset is None else offset
                lo, hi = row_interval(
                    i, seqlen_k=lens[request], offset=at, causal=causal, window=window,
                    kv_start=starts[request],
                )  # fmt: skip
                seen |= set(range(lo, hi))
            needed = any(j // page_size == column for j in seen)
            given = args._replace(page_table=table)
            if not needed:
                validate.check_contents(given, sum(rows) if args.cu_seqlens_q is not None else 1, pool)
                continue
            with pytest.raises(SpecError, match=f"for request {request} in column {column}"):
                validate.check_contents(given, sum(rows) if args.cu_seqlens_q is not None else 1, pool)

    @pytest.mark.parametrize("backend", HERE)
    def test_unneeded_entries_change_no_bit(self, backend):
        q, k, v, table, lens = problem(page_size=2, lens=(7, 0, 12))
        options = {"window": (3, 0), "backend": backend}
        want = attention_paged(q, k, v, table, lens, **options)
        for garbage in (-1, 5, 10**9):
            other = torch.full_like(table, garbage)
            other[0, 1:4], other[2, 4:6] = table[0, 1:4], table[2, 4:6]
            assert torch.equal(attention_paged(q, k, v, other, lens, **options), want)

    def test_tables_are_not_changed(self):
        q, k, v, table, lens = problem()
        copies = [x.clone() for x in (q, k, v, table, lens)]
        attention_paged(q, k, v, table, lens)
        assert all(torch.equal(a, b) for a, b in zip(copies, (q, k, v, table, lens), strict=True))


class TestGradients:
    def test_they_are_refused_in_words(self):
        for place in range(4):
            q, k, v, table, lens = problem()
            sinks = torch.zeros(4)
            given = [q, k, v, sinks]
            given[place] = given[place].clone().requires_grad_()
            q, k, v, sinks = given
            call = lambda: attention_paged(q, k, v, table, lens, sinks=sinks)  # noqa: B023, E731
            with pytest.raises(UnsupportedError, match=r"paged attention has no gradients.*no_grad"):
                call()
            with torch.no_grad():
                assert call().grad_fn is None
            with torch.inference_mode():
                call()

    def test_under_transforms_and_in_graphs_too(self):
        q, k, v, table, lens = problem()
        loss = lambda q: attention_paged(q, k, v, table, lens).sum()  # noqa: E731
        with pytest.raises(UnsupportedError, match="inference"):
            torch.func.grad(loss)(q)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="inference"):
            torch.compile(loss, fullgraph=True, backend="aot_eager")(q.clone().requires_grad_())
        args = Arguments(page_table=table, kv_lens=lens)
        with pytest.raises(UnsupportedError, match="inference"):
            torch.ops.polyflash.attention(
                q[:, :, None].clone().requires_grad_(), k.transpose(1, 2), v.transpose(1, 2), *args
            )

    def test_vmap_is_a_loop(self):
        q, k, v, table, lens = problem()
        many = torch.stack((q, q.flip(0), q + 1))
        got = torch.vmap(lambda q: attention_paged(q, k, v, table, lens, causal=True))(many)
        for i in range(3):
            assert torch.equal(got[i], attention_paged(many[i], k, v, table, lens, causal=True))


def test_autocast_casts_q_to_the_pools_and_never_the_pools():
    q, k, v, table, lens = problem()
    low = [x.bfloat16() for x in (q, k, v)]
    want = attention_paged(*low, table, lens)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention_paged(q, *low[1:], table, lens), want)
        assert torch.equal(attention_paged(*low, table, lens), want)
        full = attention_paged(low[0], k, v, table, lens)
    assert full.dtype is torch.float32
    assert torch.equal(full, attention_paged(low[0].float(), k, v, table, lens))


def test_backend_in_use():
    q, k, v, table, lens = problem(dtype=torch.float64)
    attention_paged(q, k, v, table, lens)
    with use_backend("cpu"), pytest.raises(UnsupportedError, match="float64"):
        attention_paged(q, k, v, table, lens)
    with use_backend("torch"):
        assert explain(q, k, v, page_table=table, kv_lens=lens).backend == "torch"


class TestGraphs:
    @pytest.mark.parametrize("packed", [False, True])
    def test_decode_steps_compile_at_most_twice(self, packed):
        """Lengths, tables, their width, the batch and the size of the pool change; the graph does not."""
        torch._dynamo.reset()
        counter = CompileCounter()

        def call(q, k, v, table, lens, cu):
            out, lse = attention_paged(q, k, v, table, lens, cu_seqlens_q=cu, causal=True, return_lse=True)
            return out * 2, lse

        compiled = torch.compile(call, fullgraph=True, backend=counter)
        for n in range(8):
            lens = [5 + n, 2, 9 + n, *[3] * n]
            cu = torch.arange(len(lens) + 1).to(INT) * 2 if packed else None
            rows = 2 * len(lens) + 1 if packed else len(lens)
            inputs = problem(lens=lens, max_pages=7 + n, num_pages=20 + n, rows=rows)
            got, want = compiled(*inputs, cu), call(*inputs, cu)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert counter.frame_count <= 2

    def test_contents_are_checked_when_a_graph_runs(self):
        torch._dynamo.reset()
        q, k, v, table, lens = problem()
        compiled = torch.compile(attention_paged, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, k, v, table, lens), attention_paged(q, k, v, table, lens))
        with pytest.raises(SpecError, match="for request 0 in column 0"):
            compiled(q, k, v, table + 50, lens)

    def test_contents_are_not_read_while_tracing(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            q, k, v = torch.randn(9, 4, 8), torch.randn(11, 3, 2, 8), torch.randn(11, 3, 2, 6)
            table, cu = torch.zeros(3, 5, dtype=INT), torch.zeros(4, dtype=INT)
            out, lse = attention_paged(q, k, v, table, cu[1:], cu_seqlens_q=cu, return_lse=True)
            assert out.shape == (9, 4, 6) and lse.shape == (4, 9)
            with pytest.raises(SpecError, match="one token per request"):
                attention_paged(q, k, v, table, cu[1:])
            with pytest.raises(NotImplementedError, match="float64"):
                doubles = (x.double() for x in (q, k, v))
                attention_paged(*doubles, table, cu[1:], cu_seqlens_q=cu, backend="cpu")

    @pytest.mark.parametrize("strict", [False, True])
    def test_export(self, strict):
        class Step(torch.nn.Module):
            def forward(self, q, k, v, table, lens):
                return attention_paged(q, k, v, table, lens, causal=True)

        given = problem()
        program = torch.export.export(Step(), given, strict=strict)
        assert torch.equal(program.module()(*given), attention_paged(*given, causal=True))


def test_a_decode_loop_adds_no_route():
    """A thousand steps over few and many keys, batches of all sizes, growing tables."""
    attention_paged(*problem(), causal=True)
    q, k, v, table, lens = problem(page_size=16, lens=(1,), max_pages=100, num_pages=101, rows=1, garbage=0)
    for width in (3, 100):  # few keys, many keys
        attention_paged(q, k, v, table[:, :width], lens, causal=True)
    before = len(torch_ops._routes)
    for n in range(0, 1000, 9):
        batch = 1 + n % 5
        rows, tables = q.expand(batch, 4, 16), table.expand(batch, 100)[:, : n // 16 + 1]
        attention_paged(rows, k, v, tables, lens.new_full((batch,), n), causal=True)
    assert len(torch_ops._routes) == before


class TestExplain:
    def test_it_takes_meta_tensors_and_reads_nothing(self):
        q, k = torch.empty(32, 8, 64, device="meta"), torch.empty(500, 16, 2, 64, device="meta")
        table = torch.empty(32, 128, device="meta", dtype=INT)
        lens = torch.empty(32, device="meta", dtype=INT)
        plan = explain(q, k, k, page_table=table, kv_lens=lens, causal=True, target="cpu:avx512")
        spec = plan.spec
        assert plan.backend == "cpu" and spec.phase is Phase.DECODE and Feature.PAGED in spec.features
        assert (spec.batch, spec.seqlen_q, spec.seqlen_k, spec.page_size) == (32, 1, 2048, 16)
        assert "page_size=16" in str(plan) and "kv_lens are not read" in str(plan)
        assert plan.work.flops == 4 * 64 * 32 * 8 * 2048
        assert plan.work.bytes == 4 * 2 * 64 * 32 * (8 + 2 * 2048)

    def test_packed_rows_count_every_request(self):
        q, k = torch.empty(300, 8, 64, device="meta"), torch.empty(500, 16, 2, 64, device="meta")
        table, lens = (torch.empty(s, device="meta", dtype=INT) for s in ((4, 10), (4,)))
        cu = torch.empty(5, device="meta", dtype=INT)
        plan = explain(q, k, k, page_table=table, kv_lens=lens, cu_seqlens_q=cu, max_seqlen_q=100)
        spec = plan.spec
        assert spec.phase is Phase.FORWARD and (spec.members, spec.seqlen_q, spec.seqlen_k) == (4, 300, 160)
        assert plan.work.flops == 4 * 64 * 8 * 300 * 160
        assert plan.work.bytes == 4 * 2 * 64 * (8 * 300 + 2 * 4 * 160)

    def test_it_refuses_what_the_call_refuses(self):
        q, k, v, table, lens = problem()
        with pytest.raises(SpecError, match="q: got 4 dimensions"):
            explain(q[None], k, v, page_table=table, kv_lens=lens)
        with pytest.raises(SpecError, match="kv_lens: got None"):
            explain(q, k, v, page_table=table)

    def test_gradients_have_no_row(self):
        q, k, v, table, lens = problem()
        plan = explain(q.requires_grad_(), k, v, page_table=table, kv_lens=lens)
        assert plan.backward.chosen is None and "has no paged keys" in str(plan.backward)

    def test_only_forward_rows_claim_pages_and_bounds(self):
        for row in backends.TABLE:
            if row.phase in (Phase.BACKWARD, Phase.STATISTICS):
                assert not {Feature.PAGED, Feature.ROW_BOUNDS} & row.features


class TestDecodePhase:
    """Which calls are planned as decode, by the routes they make."""

    def phases(self, monkeypatch, call):
        monkeypatch.setattr(torch_ops, "_routes", {})
        monkeypatch.setattr(repeats, "_known", {})
        call()
        return [key[0] for key in torch_ops._routes]

    @pytest.mark.parametrize("profiled", [False, True])
    def test_few_rows_without_gradients(self, monkeypatch, profiled):
        q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 30, 8)

        def phases(**options):
            def call():
                if not profiled:
                    return attention(**{"q": q, "k": k, "v": k, **options})
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                    return attention(**{"q": q, "k": k, "v": k, **options})

            return self.phases(monkeypatch, call)

        assert phases() == [Phase.DECODE] and phases(return_lse=True) == [Phase.DECODE]
        assert phases(q=torch.randn(1, 4, 5, 8)) == [Phase.DECODE]
        assert phases(q=torch.randn(1, 4, 20, 8)) == [Phase.FORWARD]  # 40 rows a kv head, 30 keys
        with torch.no_grad():
            assert phases(k=k.clone().requires_grad_()) == [Phase.DECODE]
        for hooked in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)):
            with hooked:
                trained = phases(q=q.clone().requires_grad_())
            assert trained[0] is Phase.FORWARD and Phase.DECODE not in trained
        assert phases(out=torch.empty_like(q)) == [Phase.DECODE]

    def test_packed_rows_are_forward(self, monkeypatch):
        q, k, v, table, lens = problem()
        call = lambda: attention_paged(q, k, v, table, lens, cu_seqlens_q=ints(0, 1, 2, 3))  # noqa: E731
        assert self.phases(monkeypatch, call) == [Phase.FORWARD]
        assert self.phases(monkeypatch, lambda: attention_paged(q, k, v, table, lens)) == [Phase.DECODE]

    @needs_cpu_engine
    def test_batch_invariant_calls_take_the_forward_row(self):
        q, k, v, table, lens = problem()
        plan = explain(q, k, v, page_table=table, kv_lens=lens, batch_invariant=True)
        assert plan.chosen.name == "cpu/forward" and plan.spec.phase is Phase.DECODE
