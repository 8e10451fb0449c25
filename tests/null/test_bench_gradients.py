"""Gradients on the bench: which rows there are, what they are held to, that a wrong one makes no ratio."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from benchmarks import cases, command, problem, tables
from benchmarks.cases import BACKWARD, FORWARD, OPERANDS, SDPA, SHARES, STEP, Case
from polyflash import cli
from polyflash.compare import TOLERANCE

QUICK = cases.rows(["backward"], size="quick")
BY_KIND = {f"{c.kind}{'-gqa' if c.workload.kv_heads == 2 else ''}": c for c in reversed(QUICK)}


def small(kind: str, dtype: str = "float64") -> Case:
    """The case of that kind with 4 heads and 48 keys (packed: 3 members); over 2 key/value heads if
    grouped."""
    case = BY_KIND[kind]
    batch, window = (3 if case.laid == "packed" else 1), case.workload.window and (5, None)
    kv_heads = 4 if case.workload.kv_heads == case.workload.heads else 2
    sizes = {"batch": batch, "heads": 4, "kv_heads": kv_heads, "seqlen_q": 48, "seqlen_k": 48, "head_dim": 8}
    made = replace(case.workload, dtype=dtype, window=window, **sizes)
    return replace(case, workload=made, dense=case.dense and replace(made, kv_heads=4))


def built(case: Case) -> problem.GradientProblem:
    return problem.differentiated(problem.build(case), case.timed)


def wrong(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> None:
    """Our calls give the gradient of one operand, changed."""
    for function in ("attention", "attention_varlen"):
        attend: Any = getattr(polyflash, function)

        def attention(q: Tensor, k: Tensor, v: Tensor, attend: Any = attend, **options: Any) -> Any:
            given = {"q": q, "k": k, "v": v, **options}
            if name in given and given[name].requires_grad:
                given[name] = given[name].view_as(given[name])
                given[name].register_hook(change)
            return attend(given.pop("q"), given.pop("k"), given.pop("v"), **given)

        monkeypatch.setattr(polyflash, function, attention)


def one_row(g: Tensor) -> Tensor:
    """One row of every head, off by a fifth; of a vector, its last element."""
    changed = g.clone()
    (changed[-1:] if g.ndim == 1 else changed[..., -2, :] if g.ndim == 4 else changed[-2]).mul_(1.2)
    return changed


def test_the_rows_of_the_speed_promise_are_there():
    names = {c.name: c for c in cases.rows(["backward"])}
    longest = {c.name for c in cases.rows(["backward"], size="long")}
    for kind in ("full", "causal"):
        for head_dim in (64, 128):
            for dtype in ("float32", "bfloat16", "float16"):
                assert names[f"backward-{kind}-{dtype}-512-d{head_dim}"].peer == SDPA
                assert names[f"backward-{kind}-{dtype}-2048-d{head_dim}"].timed == BACKWARD
                assert f"backward-{kind}-{dtype}-4096-d{head_dim}" in longest
            for dtype in ("float32", "bfloat16"):
                gqa = names[f"backward-{kind}-{dtype}-2048-d{head_dim}-gqa"]
                assert (gqa.workload.kv_heads, gqa.dense.kv_heads, gqa.dense.seqlen_q) == (2, 8, 2048)
                few = names[f"backward-{kind}-{dtype}-4096-d{head_dim}-h2"]
                assert (few.workload.heads, few.dense.heads, few.dense.seqlen_q) == (2, 8, 2048)
    steps = {(c.workload.seqlen_q, c.workload.dtype) for c in names.values() if c.timed == STEP}
    assert {(n, "float32") for n in (16, 64, 128)} <= steps
    assert names["backward-varlen-float32-1024-d64"].workload.batch == 32


def test_every_operand_has_a_row():
    kinds = {c.kind for c in QUICK if c.part == OPERANDS}
    assert kinds == {
        "mask", "docs-causal", "window", "bias", "bias-heads", "alibi-causal", "softcap", "sinks-causal",
        "dropout",
    }  # fmt: skip
    assert {c.kind for c in QUICK if not c.peer} == {"alibi-causal", "softcap", "sinks-causal", "dropout"}


def test_the_default_has_a_few_rows():
    chosen = [c for c in cases.rows() if c.suite == "backward"]
    assert 0 < len(chosen) <= 16 and {c.timed for c in chosen} == {BACKWARD, STEP}
    assert {c.timed for c in cases.rows() if c.suite != "backward"} == {FORWARD}


@pytest.mark.parametrize("kind", BY_KIND)
def test_ours_torch_and_the_oracle_agree(kind):
    made = built(small(kind))
    difference, ours, theirs = made.check()
    exact = 1e-6 if kind == "sinks-causal" else 1e-12  # sinks and their gradient are float32
    assert max(difference, ours.weighted, theirs.weighted) < exact
    assert (made.torch is None) is (BY_KIND[kind].peer == "")
    named = {"bias": "bias", "bias-heads": "bias", "sinks-causal": "sinks"}.get(kind)
    assert set(made.ours.found) == {"q", "k", "v"} | ({named} if named else set())
    assert made.room().keys() == made.ours.found.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", BY_KIND)
def test_rounding_is_no_mismatch(kind, dtype):
    difference, ours, _ = built(small(kind, dtype)).check()
    assert max(difference, ours.weighted) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "kind, name",
    [(kind, name) for kind in ("causal", "full-gqa", "mask", "dropout", "varlen") for name in "qkv"]
    + [("bias", "bias"), ("bias-heads", "bias"), ("sinks-causal", "sinks")],
)
def test_one_wrong_row_is_a_mismatch(kind, name, monkeypatch):
    """Also where only float64 can tell, as our torch row is asked through the same function."""
    for dtype in ("float32", "bfloat16"):
        case = small(kind, dtype)
        with monkeypatch.context() as patched:
            wrong(patched, name, one_row)
            difference, ours, _ = built(case).check()
        seen = difference if case.peer else ours.weighted
        assert seen > 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("change", [torch.zeros_like, lambda g: g.nan_to_num() * torch.nan, lambda g: -g])
def test_a_wrong_dq_makes_no_ratio(change, tmp_path, monkeypatch, capsys):
    wrong(monkeypatch, "q", change)
    file = tmp_path / "bench.json"
    argv = ["bench", "--suite", "backward", "--quick", "--rows", "backward-window-float32-256-d64"]
    assert cli.main([*argv, "--seconds", "0.01", "--json", str(file)]) == 1
    (r,) = json.loads(file.read_text())["rows"]
    assert r["marks"][0] == "mismatch" and r["ratio"] is None and r["over_plain"] is None
    text = " ".join(capsys.readouterr().out.split())
    assert "! —" in text and "results differ by more than rounding" in text


def test_where_one_key_is_seen_rounding_is_all_there_is():
    """dq of the first row of a causal call is 0; ours is not, and that is no error."""
    made = built(small("causal", "float32"))
    first = made.ours.found["q"][:, :, 0]
    assert 0 < float(first.abs().max()) < 1e-5
    assert float(made.room()["q"][:, :, 0].norm()) > 0


def test_the_backward_pass_is_timed_without_the_forward(monkeypatch):
    calls: list[int] = []
    attend = polyflash.attention
    monkeypatch.setattr(polyflash, "attention", lambda *x, **o: (calls.append(1), attend(*x, **o))[1])
    timed, whole = built(small("causal")), built(replace(small("causal"), timed=STEP))
    del calls[:]
    again = [timed.ours() for _ in range(3)]
    assert not calls and all(torch.equal(a, b) for a, b in zip(again[0], again[2], strict=True))
    whole.ours()
    assert len(calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(again[0], whole.ours(), strict=True))


def test_nothing_is_added_to_the_given_tensors():
    made = problem.build(small("bias"))
    differentiated = problem.differentiated(made, BACKWARD)
    differentiated.ours()
    assert not made.ours.q.requires_grad and made.ours.q.grad is None
    assert differentiated.ours.call.q.data_ptr() == made.ours.q.data_ptr()
    assert all(x.grad is None for x in differentiated.ours.inputs)


def test_work_is_that_of_what_is_timed():
    forward = problem.build(small("causal"))
    assert problem.differentiated(forward, BACKWARD).flops == 2.5 * forward.flops
    assert problem.differentiated(forward, STEP).flops == 3.5 * forward.flops
    for case in QUICK:
        if case.part == SHARES and case.workload.dtype == "float32" and case.laid != "packed":
            made = problem.build(case)
            assert made.plain_flops == pytest.approx(made.flops, rel=5e-3)
            assert made.plain.q.shape[1] == 8 == made.plain.k.shape[1]


def test_who_runs_it():
    rows = {row.backend for row in polyflash.backends.TABLE if row.phase.value == "backward"}
    assert built(small("causal", "float32")).ours.backend in rows
    assert problem.Gradient.of(
        problem.build(small("causal")).ours.on("torch"), torch.ones(1), STEP
    ).backend == ("torch")


def test_tables_by_what_is_timed():
    titles = {c.section for c in QUICK}
    assert titles >= {
        "backward, float32", "backward, heads and members, bfloat16", "backward, operands, float32",
        "forward + backward, float32", "backward, float16",
    }  # fmt: skip
    for title in titles:
        rows = [c for c in QUICK if c.section == title]
        assert len({(c.plain, c.part, c.timed) for c in rows}) == 1


def test_a_row_says_what_was_timed():
    case = replace(
        small("full-gqa", "float32"), workload=replace(small("full-gqa").workload, dtype="float32")
    )
    made = command.measure(case, seconds=0.01, calibration=None)
    assert (made["timed"], made["part"], made["plain"]) == (BACKWARD, SHARES, True)
    assert made["rate_of_plain"] > 0 and made["ratio"] > 0 and problem.PLAIN in made["arms"]
    assert "rate" in tables.columns([made]) and "×plain" not in tables.columns([made])
    assert any(line.startswith("rate: ") for line in tables.notes([made]))
