"""The suite "decode": what its arms compute, what they read, and what its tables say. Nothing is held to a
time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from benchmarks import cases, command, plot, tables
from benchmarks.cases import SDPA, Case
from benchmarks.decode import problems as decode
from benchmarks.decode import stream
from benchmarks.problem import PLAIN, error_of
from polyflash import cli
from polyflash import compare as comparing
from polyflash.bench import check
from polyflash.bench import command as wheel
from polyflash.bench import suite as plain
from polyflash.bench.timing import Comparison, Round
from polyflash.errors import SpecError

PARTS = (
    cases.STEPS, cases.FEW_ROWS, cases.PAGED, cases.RAGGED, cases.CASCADE,
    cases.GROUPS, cases.INVARIANCE, cases.CODES, cases.PREFILL,
)  # fmt: skip
QUICK = cases.decode("quick")
LAST_LEVEL = stream.last_level_bytes
SOUND = check.Accuracy(1e-7, 1e-7, 1e-7, 0.0, 2, 16)
compiled = pytest.mark.skipif(not stream.available(), reason="numba is not installed")


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Of 64 KiB, so that a few small sets spill it."""
    monkeypatch.setattr(stream, "last_level_bytes", lambda: 1 << 16)
    decode._key_sets.cache_clear()
    yield
    decode._key_sets.cache_clear()


def first(part: str, **wanted) -> Case:
    """The first float32 row of a part (of codes, of bfloat16) with these fields, on 64 keys."""
    dtype = "bfloat16" if part == cases.CODES else "float32"
    for case in QUICK:
        w = case.workload
        found = {"kind": case.kind, "laid": case.laid, "seqlen_q": w.seqlen_q}
        if case.part == part and w.dtype == dtype and wanted.items() <= found.items():
            rows, dim = (64, 64) if part == cases.PREFILL else (w.seqlen_q, 64 if part == cases.CODES else 16)
            small = replace(w, seqlen_q=rows, seqlen_k=64, head_dim=dim)
            return replace(case, workload=small, private=case.private and 16)
    raise LookupError(part, wanted)


def row(case: Case, seconds: dict[str, float], **chosen) -> dict:
    """A measured row of three quiet rounds, all alike, whose call reads 40 MB."""
    rounds = Comparison(tuple(Round({plain.OURS: 1e-3, **seconds}, 1.0) for _ in range(3)))
    made = command.row(
        case, "cpu/decode", rounds, 0.0, SOUND, SOUND, 1e9, 1e9, None, 1, bytes=40_000_000, chosen=chosen
    )
    return {"section": case.section, **made}


def figures(r: dict) -> dict[str, str]:
    return {name: cell(r) for name, cell in tables.columns([r]).items()}


@compiled
@pytest.mark.parametrize("places", [1, 2, 4, 8])
def test_a_read_leaves_nothing_out(places):
    sizes = (128, 3 * 128, (stream.PIECE >> 2) + 128, 2 * (stream.PIECE >> 2))
    tensors = [torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32) for n in sizes]
    read = stream.Read(tensors, places)
    read()
    assert read.bytes == 4 * sum(sizes)
    assert read.total == sum(int(x.sum(dtype=torch.int64)) for x in tensors) % (1 << 32)
    tensors[-1][-1] += 1
    before = read.total
    read()
    assert read.total == (before + 1) % (1 << 32)


@compiled
def test_what_a_read_cannot_read_is_refused():
    with pytest.raises(SpecError, match="multiple"):
        stream.Read([torch.zeros(100)])
    with pytest.raises(SpecError, match="strides"):
        stream.Read([torch.zeros(256, 256)[:, ::2]])


def test_sets_spill_the_last_cache_and_come_by_turns():
    assert decode.copies(1 << 15) * (1 << 15) == decode.SPILL << 16
    assert decode.copies(1 << 30) == 1
    assert decode.copies(1) == decode.MOST
    sets = decode.key_sets(first(cases.STEPS).workload)
    assert sum(s.bytes for s in sets) >= decode.SPILL << 16
    assert len({s.k.data_ptr() for s in sets}) == len(sets) > 1
    assert all(torch.equal(s.k, sets[0].k) and torch.equal(s.v, sets[0].v) for s in sets)
    turn = decode.Turn(sets)
    assert {id(turn()) for _ in sets} == set(map(id, sets))
    assert turn() is not turn()


def test_the_system_tells_its_cache_and_pages():
    assert LAST_LEVEL() >= 1 << 20 and LAST_LEVEL() % 1024 == 0
    assert wheel.huge_pages() in ("", "always", "madvise", "never")


@pytest.mark.parametrize("heads_outer", [False, True])
def test_pages_hold_what_the_whole_holds(heads_outer):
    k, v = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
    made = decode.pool(k, v, 16, heads_outer=heads_outer)
    assert made.k.shape == (4, 16, 2, 8)
    assert made.k.is_contiguous() is not heads_outer
    assert made.table.tolist() != [[0, 1, 2, 3]]
    assert torch.equal(decode.gathered(made.k, made.table[0], 64), k)
    assert torch.equal(decode.gathered(made.v, made.table[0], 50), v[:, :, :50])


@pytest.mark.skipif(not stream.available(), reason="the loop is compiled")
@pytest.mark.parametrize("heads_outer", [False, True])
def test_every_byte_of_the_pages_is_read(heads_outer):
    k, v = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    read = decode.pool(k, v, 16, heads_outer=heads_outer).reader()
    read()
    want = sum(int(x.contiguous().view(torch.int32).sum(dtype=torch.int64)) for x in (k, v))
    assert read.bytes == k.nbytes + v.nbytes and read.total == want % (1 << 32)


def test_requests_of_a_batch_share_no_page():
    table, pages = decode.page_tables([1, 33, 16], 16)
    used = [table[b, : -(-n // 16)].tolist() for b, n in enumerate([1, 33, 16])]
    assert sorted(page for pages_of in used for page in pages_of) == list(range(pages)) == list(range(5))


@pytest.mark.parametrize("laid", [cases.EVEN, cases.GEOMETRIC])
def test_lengths_go_from_1_to_the_longest(laid):
    case = next(c for c in cases.decode() if c.part == cases.RAGGED and c.laid == laid)
    sizes = decode.lengths(case)
    assert (len(sizes), min(sizes), max(sizes)) == (32, 1, 32768)
    assert (sum(sizes) > 500_000) is (laid == cases.EVEN)


def test_zigzag_groups_end_where_their_chunks_do():
    case = replace(first(cases.GROUPS, laid=cases.ZIGZAG), ranks=2)
    assert decode.group_ends(replace(case, rank=0)) == [16, 64]
    assert decode.group_ends(replace(case, rank=1)) == [32, 48]
    assert decode.group_ends(replace(case, laid=cases.CHUNKS)) == [16, 32, 48, 64]


def test_the_rows_of_the_promise_are_there():
    steps = {
        (w.dtype, w.heads, w.seqlen_q, w.seqlen_k, w.head_dim)
        for w in (c.workload for c in cases.decode() if c.part == cases.STEPS)
    }
    for dtype in ("bfloat16", "float16", "float32"):
        for heads in (8, 32):
            for rows in (1, 2, 4, 8):
                for keys in (4096, 16384, 65536):
                    assert {(dtype, heads, rows, keys, 64), (dtype, heads, rows, keys, 128)} <= steps
    groups = {
        (c.ranks, c.workload.seqlen_q)
        for c in cases.decode()
        if c.part == cases.GROUPS and c.laid == cases.ZIGZAG
    }
    assert groups == {(ranks, 2**n) for ranks in (2, 4, 8, 16) for n in range(10)}
    cascade = next(c for c in cases.decode() if c.part == cases.CASCADE)
    w = cascade.workload
    assert (w.dtype, w.batch, w.heads, w.kv_heads, w.head_dim) == ("bfloat16", 32, 8, 8, 128)
    assert (w.seqlen_k - cascade.private, cascade.private) == (8192, 256)
    assert {c.part for c in cases.decode()} == {c.part for c in QUICK} == set(PARTS)


BUILT = [
    first(cases.STEPS, kind="mha", seqlen_q=1),
    first(cases.STEPS, kind="gqa", seqlen_q=4),
    first(cases.PAGED, kind="gqa", seqlen_q=1, laid=cases.TOKENS_OUTER),
    first(cases.PAGED, kind="mha", seqlen_q=4, laid=cases.HEADS_OUTER),
    first(cases.RAGGED, laid=cases.GEOMETRIC),
    first(cases.RAGGED, kind="gqa"),
    first(cases.CASCADE, kind="gqa"),
    first(cases.GROUPS, laid=cases.ZIGZAG, seqlen_q=16),
    first(cases.GROUPS, laid=cases.CHUNKS, seqlen_q=1),
    first(cases.INVARIANCE, kind="gqa", seqlen_q=4),
]


@pytest.mark.parametrize("case", BUILT, ids=lambda c: c.name)
def test_all_arms_answer_the_same_question(case):
    """Every output against every other, and samples of two of them against float64."""
    made = decode.build(case)
    difference, ours, other = made.check()
    assert difference < 1e-5 and ours.weighted < 1e-5 and other.weighted < 1e-5
    assert len(made.outputs) >= 2 and made.samples and made.backend
    assert next(iter(made.arms)) == plain.OURS
    for call in made.arms.values():
        call()
    out = made.outputs[0]().clone()
    assert error_of(made.samples, out + 1e-3).weighted > 1e-5


@pytest.mark.parametrize("case", BUILT, ids=lambda c: c.name)
def test_bytes_are_those_of_the_keys_seen(case):
    w, made = case.workload, decode.build(case)
    per_key = w.kv_heads * 2 * w.head_dim * 4
    keys = {
        cases.RAGGED: lambda: sum(decode.lengths(case)),
        cases.CASCADE: lambda: w.seqlen_k - case.private + w.batch * case.private,
        cases.GROUPS: lambda: max(decode.group_ends(case)),
        cases.INVARIANCE: lambda: w.batch * w.seqlen_k,
    }.get(case.part, lambda: w.seqlen_k)()
    assert made.bytes == per_key * keys


def test_a_wrong_table_is_a_mismatch(monkeypatch):
    right = polyflash.attention_paged
    monkeypatch.setattr(
        polyflash,
        "attention_paged",
        lambda q, k, v, table, *rest, **o: right(q, k, v, 0 * table, *rest, **o),
    )
    found = command.measure(BUILT[2], seconds=0.001, calibration=None)
    assert "mismatch" in found["marks"]
    assert figures(found)["×whole"] == "! —"


@pytest.mark.parametrize("scheme", ["bfloat16", "int8", "int4"])
def test_steps_over_codes_beside_16_bits_and_others(scheme, monkeypatch):
    """Each peer has as many bits a value; errors are those of what was encoded."""
    asked = []

    def fake(sets, bits, threads):
        asked.append(bits)
        right = [scaled_dot_product_attention(q, k, v, enable_gqa=True) for q, k, v in sets]
        yield decode.GGML, [lambda x=x: 1.5 * x for x in right]

    monkeypatch.setattr(decode, "others", fake)
    made = decode.build(first(cases.CODES, kind="gqa", laid=scheme))
    bits = {"bfloat16": 16, "int8": 8, "int4": 4}[scheme]
    assert asked == [bits] and (PLAIN in made.arms) is (bits < 16)
    assert bits / 8 <= made.bytes / (64 * 8 * 2 * 64) < bits / 8 + 0.4
    errors = made.chosen["errors"]
    assert errors[decode.GGML] == pytest.approx(0.5, rel=0.02)
    assert {16: 1e-3, 8: 4e-3, 4: 5e-2}[bits] < errors[plain.OURS] < {16: 1e-2, 8: 4e-2, 4: 0.3}[bits]
    difference, ours, _ = made.check()
    assert max(difference, ours.weighted) < comparing.TOLERANCE["bfloat16"]
    out = made.outputs[0]().clone()
    wrong = replace(made, outputs=(lambda: 1.1 * out, *made.outputs[1:])).check()
    assert max(wrong[0], wrong[1].weighted) > comparing.TOLERANCE["bfloat16"]


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_a_prefill_by_integer_products_beside_floats(kind):
    made = decode.build(first(cases.PREFILL, kind=kind))
    difference, ours, _ = made.check()
    assert max(difference, ours.weighted) < comparing.TOLERANCE["float32"]
    assert {SDPA, PLAIN} < set(made.arms) and not set(decode.READERS) & set(made.arms)
    torch_s, plain_s = made.arms[SDPA](), made.arms[PLAIN]()
    assert comparing.worst_row(plain_s, torch_s) < 1e-5
    assert made.flops == 4 * 64 * 8 * 64 * (64 if kind == "full" else 32)


def test_every_other_output_is_compared_with_ours():
    made = decode.build(BUILT[0])
    out = made.outputs[0]()
    wrong = replace(made, outputs=(lambda: out, lambda: 1.01 * out, lambda: out))
    difference, ours, last = wrong.check()
    assert difference == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert ours == last


def test_figures_are_rates_and_ratios_of_medians():
    step = first(cases.STEPS, kind="gqa")
    arms = {decode.IN_ORDER: 0.9e-3, decode.PLACES: 0.8e-3, SDPA: 5e-3, decode.FOLDED: 2e-3}
    found = figures(row(step, {**arms, command.AFTER: 2e-3}))
    assert found["GB/s"] == "40.0" and (found["stream"], found["by"], found["after"]) == ("80%", "places", "")
    between = {decode.between(name): s for name, s in zip(decode.READERS, (1e-3, 3e-3, 2e-3), strict=True)}
    found = figures(row(step, {**arms, decode.AMAX: 0.7e-3, command.AFTER: 2e-3, **between}))
    assert (found["stream"], found["by"], found["after"]) == ("70%", "amax", "50%")
    assert found["ratio"] == "5.00" and found["folded"] == "2.00" and found["on"] == "cpu/decode"
    alone = Comparison((Round({plain.OURS: 1.0, SDPA: 1.0}, 1.0),))
    assert command.row(step, "", alone, 0.0, SOUND, SOUND, 1.0, 1.0, None, 1)["after_torch"] is None
    found = figures(row(first(cases.PAGED), {PLAIN: 0.8e-3, decode.PAGES: 0.7e-3}))
    assert found["×whole"] == "1.25" and found["stream"] == "" and found["of pages"] == "70%"
    assert figures(row(first(cases.RAGGED), {PLAIN: 0.9e-3}))["of one"] == "90%"
    found = figures(row(first(cases.CASCADE), {PLAIN: 6e-3, decode.OWN_COPIES: 9e-3}))
    assert (found["ratio"], found["copies"]) == ("6.00", "9.00")
    for fuses, word in ((True, "one walk"), (False, "each"), (None, "")):
        found = figures(row(first(cases.GROUPS), {PLAIN: 0.5e-3}, fuses=fuses))
        assert (found["ratio"], found["taken"]) == ("0.50", word)
    arms = {decode.BEST_SPLIT: 0.8e-3, decode.INVARIANT: 3e-3}
    step = {PLAIN: 2e-3, decode.between(PLAIN): 3e-3, command.AFTER: 1e-3, decode.GGML: 4e-3}
    found = figures(row(first(cases.CODES), step, errors={plain.OURS: 0.0123}))
    assert (found["16 b"], found["after"], found["ggml"], found["onnx"]) == ("2.00", "3.00", "4.00", "")
    assert found["error"] == "1.2e-02"
    found = figures(row(first(cases.INVARIANCE), arms, split_keys=2048))
    assert (found["split"], found["×best"], found["×prefill"]) == ("2k", "1.25", "3.00")


def test_a_round_is_as_quiet_as_its_memory(monkeypatch):
    rates = iter([10.0, 20.0, 40.0, 30.0, 10.0, 30.0, 40.0, 39.0])
    monkeypatch.setattr(stream, "_read_rate", lambda: next(rates))

    class Burst:
        speeds = iter([1.0, 1.0, 1.0, 0.5])

        def speed(self) -> float:
            return next(self.speeds)

    speed = stream.MemorySpeed(Burst())
    assert [speed() for _ in range(4)] == [1.0, 1.0, 0.75, 0.5]  # the better of two reads counts


def test_memory_bound_rows_are_not_blamed_for_scaling():
    case = first(cases.STEPS)
    rounds = Comparison(tuple(Round({plain.OURS: 1.0, SDPA: 1.0, plain.ALONE: 1.2}, 1.0) for _ in range(3)))
    for size, marks in ((0, ["low scaling"]), (1, [])):
        made = command.row(case, "cpu", rounds, 0.0, SOUND, SOUND, 1.0, 1.0, None, 2, bytes=size)
        assert made["marks"] == marks


def test_the_page_names_each_row_and_its_columns():
    rows = [row(first(part), {SDPA: 1e-3, PLAIN: 1e-3}) for part in PARTS]
    machine = {
        "cpu": "A CPU", "target": "cpu:avx512", "features": [], "cores": 2, "threads": 2, "python": "3.11",
        "system": "Linux", "polyflash": "0.1.0", "torch": "2.13.0", "packages": {}, "peaks": [],
        "huge_pages": "madvise",
    }  # fmt: skip
    content = {"schema": tables.SCHEMA, "rows": rows, "absent": [], "commands": ["c"], "machine": machine}
    text = tables.page_of(json.loads(json.dumps(content)))
    assert "| huge pages | madvise |" in text and "×plain:" not in text
    for part in PARTS[1:]:
        dtype = "bfloat16" if part == cases.CODES else "float32"
        assert f"### decode, {part}, {dtype}" in text
    for wanted in (
        "| 8/8 | q1 | 64 | d16 |",
        "| 8/8 | q1 | 64 | by token |",
        "| zigzag W2 | r1 | 64 |",
        "4× ",
    ):
        assert wanted in text
    for block in text.split("\n\n"):
        if block.startswith("| "):
            assert len({line.count("|") for line in block.splitlines()}) == 1
    assert all(line in text for line in tables.legend(rows, ()))


def test_the_picture_has_every_step_of_the_widest_heads(tmp_path):
    pytest.importorskip("matplotlib")
    arms = {SDPA: 4e-3, decode.FOLDED: 2e-3, decode.IN_ORDER: 0.9e-3, decode.PLACES: 0.8e-3}
    rows = [row(c, arms) for c in QUICK if c.part == cases.STEPS]
    content = {"rows": rows, "machine": {"cpu": "A CPU", "threads": 2}}
    assert {r["head_dim"] for r in rows} == {64, 128}
    drawn = plot.steps(content)
    assert {r["head_dim"] for r in drawn} == {128} and 2 * len(drawn) == len(rows)
    assert plot.rate(rows[0], plain.OURS) == pytest.approx(40.0)
    assert plot.rate(rows[0], SDPA, decode.FOLDED) == pytest.approx(20.0)
    plot.draw(content, str(tmp_path / "steps.png"))
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    wrong = plot.steps({**content, "rows": [{**r, "marks": ["mismatch"]} for r in rows]})
    assert wrong == []


def test_titles_are_inside_the_picture_and_lines_apart(tmp_path, monkeypatch):
    """One narrow panel under a long name; two head counts that share their query heads."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    arms = {SDPA: 4e-3, decode.FOLDED: 2e-3, decode.IN_ORDER: 0.9e-3, decode.PLACES: 0.8e-3}
    rows = [row(c, arms) for c in QUICK if c.part == cases.STEPS and c.workload.dtype == "float32"]
    rows = [r for r in rows if r["num_q_heads"] == rows[0]["num_q_heads"]]
    machine = {"cpu": "A processor with a name as long as " + "some makers give them " * 4, "threads": 128}
    for heads in (("num_kv_heads", 1), ("num_kv_heads", 2)), (("num_kv_heads", 1),):
        content = {"rows": [{**r, **dict([h])} for h in heads for r in rows], "machine": machine}
        plot.draw(content, str(tmp_path / "steps.png"))
        figure = kept.pop()
        width, height = figure.canvas.get_width_height()
        figure.canvas.draw()
        texts = [figure._suptitle, *(axis._left_title for axis in figure.axes)]
        assert not figure._suptitle.get_window_extent().overlaps(figure.legends[0].get_window_extent())
        for box in (text.get_window_extent() for text in texts):
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert len(figure.axes) == len(heads)
        for axis in figure.axes:
            looks = [(x.get_color(), x.get_linestyle(), x.get_marker()) for x in axis.lines]
            assert len(set(looks)) == len(looks)
            assert all(len(set(x.get_xdata())) == len(x.get_xdata()) for x in axis.lines)


def test_few_rows_are_drawn_where_there_are_no_steps(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(c, {SDPA: 4e-3}) for c in QUICK if c.part == cases.FEW_ROWS]
    assert {(r["num_q_heads"], r["seqlen_q"]) for r in rows} >= {(8, 16), (32, 4), (64, 2)}
    content = {"rows": rows, "machine": {"cpu": "A CPU", "threads": 2}}
    assert plot.steps(content) == rows
    plot.draw(content, str(tmp_path / "rows.png"))
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_is_refused_before_anything_is_measured(capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "measure", None)
    assert cli.main(["bench", "--suite", "decode", "--quick", "--filter", "paged", "--plot", "x.png"]) == 1
    assert "--suite decode" in " ".join(capsys.readouterr().err.split())


@compiled
def test_one_row_of_each_part_through_the_command(tmp_path):
    names = [first(part).name for part in PARTS]
    file, drawn = tmp_path / "bench.json", tmp_path / "page.md"
    argv = [
        "bench",
        "--suite",
        "decode",
        "--quick",
        "--quiet",
        "--seconds",
        "0.01",
        "--rows",
        ",".join(names),
    ]
    assert cli.main([*argv, "--json", str(file), "--page", str(drawn)]) == 0
    found = json.loads(file.read_text())["rows"]
    assert [r["name"] for r in found] == names
    assert all(r["bytes"] > 0 and "mismatch" not in r["marks"] for r in found)
    assert found[0]["arms"].keys() >= {plain.OURS, SDPA, command.AFTER, *decode.READERS}
    assert found[0]["arms"].keys() >= {decode.between(name) for name in decode.READERS}
    assert "### decode, groups, float32" in drawn.read_text()
    assert cases.DECODE in cases.SUITES
