"""The suites: which rows there are, what lies over each, ratios against the peer and against our plain call,
and one tiny run of each through the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import polyflash
from benchmarks import cases, command, problem, tables
from benchmarks.cases import SDPA, Case
from polyflash import cli
from polyflash import compare as comparing
from polyflash.bench import check, peak
from polyflash.bench import suite as plain
from polyflash.bench.timing import Comparison, Round
from polyflash.errors import SpecError
from polyflash.reference import attention_reference
from tests.chosen import chosen
from tests.references import varlen_reference

SOUND = check.Accuracy(1e-7, 1e-7, 1e-7, 0.0, 2, 16)
FEATURES = ("masks", "bias", "varlen", "windows")
BY_KIND = {c.kind: c for c in cases.rows(FEATURES, size="quick")}


def small(kind: str, dtype: str = "float64") -> Case:
    """The case of that kind, 2 heads and 32 keys (packed: 3 members)."""
    case = BY_KIND[kind]
    batch, window = (3 if case.laid == "packed" else 1), case.workload.window and (5, 5)
    sizes = {"batch": batch, "heads": 2, "kv_heads": 2, "seqlen_q": 32, "seqlen_k": 32, "head_dim": 8}
    return replace(case, workload=replace(case.workload, dtype=dtype, window=window, **sizes))


def row(case: Case, seconds: dict[str, float], *, backend: str = "cpu", difference: float = 0.0) -> dict:
    """A measured row of three quiet rounds, all alike; 1 GFLOP, the plain call 4."""
    arms = {plain.OURS: 1e-3, command.AFTER: 1e-3, plain.ALONE: 2e-3, problem.PLAIN: 1e-3, **seconds}
    best = peak.Peak("fp32", per_thread=100.0, together=190.0, threads=2, cores=2)
    rounds = Comparison(tuple(Round(arms, 1.0) for _ in range(3)))
    made = command.row(case, backend, rounds, difference, SOUND, SOUND, 1e9, 4e9, best, 2)
    return {"section": case.section, **made}


def text_of(rows: list[dict]) -> str:
    return "\n".join(tables.table(rows, "t"))


def measured(tmp_path, *argv: str) -> tuple[int, dict]:
    file = tmp_path / "bench.json"
    code = cli.main(["bench", *argv, "--quiet", "--seconds", "0.01", "--json", str(file)])
    return code, json.loads(file.read_text())


def test_every_row_has_a_name_of_its_own():
    for size in ("quick", "", "long"):
        names = [c.name for c in cases.rows(cases.SUITES, size=size)]
        assert len(names) == len(set(names))
        assert {c.suite for c in cases.rows(cases.SUITES, size=size)} == set(cases.SUITES)


def test_without_a_suite_the_rows_are_those_against_torch():
    assert {c.suite for c in cases.rows()} == {"dense", "windows", "small", "backward"}
    assert {c.peer for c in cases.rows()} == {SDPA}


def test_the_rows_of_the_speed_promise_are_there():
    names = {c.name: c for c in cases.rows(cases.SUITES)}
    for kind in ("mask", "mask-blocks", "blocks", "docs", "bias", "bias-heads", "alibi", "softcap", "sinks"):
        for head_dim in (64, 128):
            assert names[f"{kind}-float32-2048-d{head_dim}"].plain
    assert {names[f"{kind}-float32-2048-d64"].peer for kind in ("alibi", "softcap", "sinks")} == {""}
    sizes = problem.lengths(names["varlen-float32-1024-d64"].workload)
    assert (len(sizes), int(sizes.min()), int(sizes.max())) == (32, 16, 1024)
    for peer in ("onnxruntime-mha", "onnxruntime-attention", "flexattention", "jax"):
        for kind in ("full", "causal"):
            for dtype in ("float32", "float16"):
                assert names[f"{peer}-{kind}-{dtype}-2048-d128"].peer == peer
    small_lengths = {c.workload.seqlen_q for c in names.values() if c.suite == "small"}
    assert {16, 32, 64, 128, 256, 512} <= small_lengths


@pytest.mark.parametrize("wrong", [{"suites": ["masks", "maskz"]}, {"suites": ["peers"], "peers": ["jaxx"]}])
def test_unknown_names_are_refused_with_what_there_is(wrong):
    with pytest.raises(SpecError, match=r"got (maskz|jaxx), wanted .*(varlen|onnxruntime-mha)"):
        cases.rows(**wrong)


@pytest.mark.parametrize("kind", BY_KIND)
def test_ours_and_torch_get_the_same_problem(kind):
    case = small(kind)
    made = problem.build(case)
    ours = made.ours
    if case.laid == "packed":
        bounds = ours.options["cu_seqlens_q"]
        plain = {"causal": ours.options.get("causal", False)}
        expected = varlen_reference(ours.q, ours.k, ours.v, bounds, bounds, **plain).out
    else:
        expected = attention_reference(ours.q, ours.k, ours.v, **ours.options).out
    assert comparing.worst_row(ours(), expected) < 1e-12
    assert (made.torch is None) is (case.peer == "")
    if made.torch:
        assert comparing.worst_row(made.packed(made.torch()), expected) < 1e-12


@pytest.mark.parametrize("kind", BY_KIND)
def test_the_sample_sees_what_lies_over_the_problem(kind):
    made = problem.build(small(kind))
    out = made.ours()
    assert problem.error_of(made.samples, out).weighted < 1e-12
    assert made.plain is not None and problem.error_of(made.samples, out + 1e-3).weighted > 1e-6
    if made.ours.options.keys() != made.plain.options.keys():
        unlaid = replace(made.ours, options=made.plain.options)
        if "cu_seqlens_q" not in made.ours.options:
            assert problem.error_of(made.samples, unlaid()).weighted > 1e-6


@pytest.mark.parametrize(
    "kind", ["mask", "mask-heads", "blocks", "mask-blocks", "docs", "docs-causal", "both"]
)
def test_work_is_that_of_visible_pairs(kind):
    made = problem.build(small(kind))
    q, k, v, options = made.ours.q, made.ours.k, torch.ones(1, 2, 32, 32).double(), dict(made.ours.options)
    v[:] = torch.eye(32).double()
    weights = attention_reference(q, k, v, **options).out  # row i, key j: positive iff visible
    assert made.flops == 2.0 * (8 + 8) * int((weights > 0).sum())
    assert made.plain_flops == 2.0 * (8 + 8) * 2 * (32 * 33 // 2 if options.get("causal") else 32 * 32)


def test_block_rows_see_a_quarter():
    made = problem.build(replace(small("blocks"), workload=replace(small("blocks").workload, heads=1)))
    assert made.flops == made.plain_flops / 4


def test_packed_work_is_that_of_the_members():
    made = problem.build(small("varlen"))
    sizes = made.ours.options["cu_seqlens_q"].diff().tolist()
    assert sorted(sizes) == [1, 16, 32]
    assert made.flops == 2.0 * (8 + 8) * 2 * sum(n * n for n in sizes)
    assert made.plain.q.shape == (1, 2, 32, 8) and made.plain_flops == 2.0 * (8 + 8) * 2 * 32 * 32
    out = made.ours()
    out[-1] += 1.0
    longest = sizes.index(32)
    out[int(made.ours.options["cu_seqlens_q"][longest])] += 1.0
    assert problem.error_of(made.samples, out).relative > 0.1


def test_ratios_against_the_peer_and_against_our_plain_call():
    made = row(BY_KIND["blocks"], {plain.OURS: 2e-3, SDPA: 5e-3, problem.PLAIN: 6e-3})
    assert made["ratio"] == pytest.approx(2.5)
    assert made["over_plain"] == pytest.approx(1 / 3)
    assert made["rate_of_plain"] == pytest.approx((1 / 2e-3) / (4 / 6e-3))
    lone = row(BY_KIND["softcap"], {})
    assert lone["ratio"] is None and lone["peer"] is None and lone["over_plain"] == 1.0
    wrong = row(BY_KIND["blocks"], {SDPA: 5e-3}, difference=1.0)
    assert (wrong["ratio"], wrong["over_plain"], wrong["rate_of_plain"]) == (None, None, None)
    assert "plain" in row(BY_KIND["blocks"], {SDPA: 5e-3}) and "1.00" in text_of([lone])


def test_tables_say_who_ran():
    case = BY_KIND["mask"]
    rows = [row(case, {SDPA: 1e-3}), row(case, {SDPA: 1e-3}, backend="torch")]
    first, second = text_of(rows).splitlines()[-2:]
    assert first.rstrip().endswith("cpu") and second.rstrip().endswith("torch")


@pytest.mark.parametrize("name", cases.SUITES)
def test_every_table_fits_80_columns(name):
    every = cases.rows([name], size="long")
    titles = {c.section: [d for d in every if d.section == c.section] for c in every}
    for titled in titles.values():
        slow = {plain.OURS: 1.30689, plain.ALONE: 99.0, problem.PLAIN: 0.01}
        rows = [row(c, {**slow, c.peer or SDPA: 16.1234}, backend="torch") for c in titled]
        text = text_of(rows)
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "name", chosen([n for n in cases.SUITES if n != cases.PEER_SUITE], "bias", "windows", "dense")
)
def test_a_tiny_run_of_each_suite(name, tmp_path, capsys):
    words = {
        "windows": ["float32"],
        "small": ["full", "float32", "b1"],
        "backward": ["step", "float32"],
        "decode": ["decode", "gqa", "float32", "q2", "256", "d64"],
    }.get(name, ["float32", "d64"])
    code, found = measured(tmp_path, "--suite", name, "--quick", "--filter", *words)
    assert code == 0 and found["absent"] == []
    assert {r["suite"] for r in found["rows"]} == {name}
    for r in found["rows"]:
        assert "mismatch" not in r["marks"] and r["difference"] < 1e-5 and r["backend"]
        assert (r["ratio"] is None) is (r["peer"] is None)
        assert (r["over_plain"] is None) is (name in ("small", "dense", "backward", "decode"))
        assert set(r["arms"]) == set(r["rounds"][0]["seconds"])
    assert found["commands"] == [
        f"polyflash bench --suite {name} --filter {' '.join(words)} --quick --seconds 0.01"
    ]
    assert capsys.readouterr().out.count("problem") == 1


def test_a_wrong_mask_is_a_mismatch(tmp_path, monkeypatch):
    attention = polyflash.attention
    monkeypatch.setattr(
        polyflash, "attention", lambda q, k, v, **options: attention(q, k, v, **{**options, "softcap": 0.0})
    )
    code, found = measured(tmp_path, "--suite", "bias", "--quick", "--rows", "softcap-float32-256-d64")
    # Our torch row is asked through the same function, so only float64 can tell.
    (r,) = found["rows"]
    assert code == 1 and r["marks"][0] == "mismatch" and r["over_plain"] is None
    assert r["difference"] < 1e-5 < r["error"]["ours"]


def document(rows: list[dict], *, cpu: str = "A CPU", command: str = "polyflash bench") -> dict:
    machine = {
        "cpu": cpu, "target": "cpu:avx512", "features": ["avx512_bf16"], "cores": 2, "threads": 2,
        "python": "3.11.7", "system": "Linux x86_64", "polyflash": "0.1.0", "torch": "2.13.0",
        "packages": {"numba": "0.68.1", "triton": ""},
        "peaks": [{"kind": "fp32", "gflops_per_thread": 118.0, "gflops_together": 217.0, "threads": 2}],
    }  # fmt: skip
    absent = [{"section": "a|b peer", "name": "x-full", "reason": "not installed"}]
    content = {
        "schema": tables.SCHEMA,
        "rows": rows,
        "absent": absent,
        "commands": [command],
        "machine": machine,
    }
    return json.loads(json.dumps(content))


def test_the_page_has_every_row_the_machine_and_the_command():
    rows = [
        row(BY_KIND["blocks"], {SDPA: 5e-3}),
        row(BY_KIND["softcap"], {}),
        row(BY_KIND["varlen"], {SDPA: 5e-3}),
    ]
    text = tables.page_of(document(rows))
    for part in (
        "A CPU",
        "torch 2.13.0",
        "numba 0.68.1",
        "`polyflash bench`",
        "fp32 118 GF/s",
        "Python 3.11.7",
    ):
        assert part in text
    for title in ("### masks, ", "### bias, ", "### varlen, ", "### Not run"):
        assert title in text
    assert "| blocks | 256 | " in text and "| softcap | 256 | " in text
    assert "a\\|b peer: x-full: not installed" in text and "triton" not in text
    for block in text.split("\n\n"):
        if block.startswith("| "):
            assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1


def test_the_page_keeps_its_title_and_what_was_written_by_hand():
    rows = [row(BY_KIND["blocks"], {SDPA: 5e-3})]
    before = f"# my machine\n\n| old | table |\n\n{tables.TAIL}\n\n- **Losses.** Some.\n"
    after = tables.page_of(document(rows), before)
    assert after.startswith("# my machine\n") and after.endswith(f"\n{tables.TAIL}\n\n- **Losses.** Some.\n")
    assert "old" not in after
    assert tables.page_of(document(rows), after) == after


def test_a_row_measured_again_replaces_the_older_one():
    first, other = BY_KIND["blocks"], BY_KIND["softcap"]
    older = document([row(first, {SDPA: 5e-3}), row(other, {})])
    newer = document([row(first, {SDPA: 9e-3})], command="polyflash bench --suite masks")
    whole = tables.merged([older, newer])
    assert [r["name"] for r in whole["rows"]] == [first.name, other.name]
    assert whole["rows"][0]["ratio"] == pytest.approx(9.0)
    assert whole["commands"] == ["polyflash bench", "polyflash bench --suite masks"]
    with pytest.raises(SpecError, match="cpu"):
        tables.merged([older, document([], cpu="another")])


def test_files_become_a_page(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(document([row(BY_KIND["blocks"], {SDPA: 5e-3})])))
    assert cli.main(["bench", "--from", str(tmp_path / "a.json"), "--page", str(tmp_path / "p.md")]) == 0
    assert "5.00" in (tmp_path / "p.md").read_text() and "5.00" in capsys.readouterr().out
    marked = row(BY_KIND["docs"], {SDPA: 5e-3}, difference=1.0)
    (tmp_path / "c.json").write_text(json.dumps(document([row(BY_KIND["mask"], {SDPA: 5e-3}), marked])))
    assert cli.main(["bench", "--from", str(tmp_path / "c.json"), "--list"]) == 0
    assert capsys.readouterr().out == f"{BY_KIND['docs'].name}\n"
    (tmp_path / "b.json").write_text("{}")
    assert cli.main(["bench", "--from", str(tmp_path / "b.json")]) == 1
    assert "polyflash bench --json" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["bench", "--calls", "--page", str(tmp_path / "p.md")]) == 1


def test_two_samples_join_to_the_worse_of_both():
    other = check.Accuracy(1e-3, 1e-9, math.inf, 0.0, 1, 8)
    assert SOUND | other == check.Accuracy(1e-3, 1e-7, math.inf, 0.0, 2, 24)
