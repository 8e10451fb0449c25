"""Peers: who is absent and why, and the protocol with a peer's process, spoken with peers made up here."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch

from benchmarks import cases, command, peers
from benchmarks.peers import PEERS, Peer
from polyflash import cli
from tests import processes

FAKE = """
import os, sys, time
import torch

def sdpa(q, k, v, causal, threads):
    print("libraries print here", flush=True)
    if causal:
        raise ValueError("no causal here\\nand more lines")
    assert torch.get_num_threads() == threads == 1
    assert not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) == 1
    wrong = 1.5 if q.dtype is torch.bfloat16 else 1.0
    return lambda: wrong * torch.nn.functional.scaled_dot_product_attention(q, k, v)

def dies(q, k, v, causal, threads):
    sys.stderr.write("first words\\nlast words\\n")
    sys.stderr.flush()
    os._exit(3)

def hangs(q, k, v, causal, threads):
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """Processes begin with torch imported."""
    monkeypatch.setattr(peers, "_SPAWN", processes.forking())


def chosen(*kinds: str) -> list[cases.Case]:
    """Tiny cases named by kind and dtype, "full-float32"."""
    every = cases.rows(["peers"], size="quick", peers=["jax"])
    named = {f"{c.kind}-{c.workload.dtype}": c for c in every}
    tiny = {"heads": 2, "kv_heads": 2, "seqlen_q": 64, "seqlen_k": 64, "head_dim": 16}
    return [replace(c, workload=replace(c.workload, **tiny)) for c in (named[kind] for kind in kinds)]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A peer of this module's, by the name of its function."""
    (tmp_path / "fake_peer.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda function: Peer("fake", ("torch",), f"fake_peer:{function}")


def test_absent_peers_are_named_with_the_reason():
    assert "no_such_package_a and no_such_package_b not installed" in (
        Peer("x", ("torch", "no_such_package_a", "no_such_package_b"), "x:y").absent
    )
    assert "compiler" in Peer("x", ("torch",), "x:y", ("no-such-tool-1", "no-such-tool-2")).absent
    assert Peer("x", ("torch",), "x:y").absent == ""
    assert torch.__version__.startswith(Peer("x", ("torch",), "x:y").version)


def test_an_absent_peer_starts_no_process(monkeypatch):
    monkeypatch.setattr(command, "Child", None)
    answers = list(
        command.answers("jax", chosen("full-float32"), seconds=1, peer=Peer("x", ("no_such_one",), ""))
    )
    assert answers == [{"name": "jax-full-float32-512-d128", "reason": "no_such_one not installed"}]


def test_every_adapter_is_where_its_peer_says():
    for peer in PEERS.values():
        module, _, function = peer.prepare.partition(":")
        assert module == peers.__name__ and callable(getattr(peers, function))


def test_a_peer_in_its_own_process_answers_case_by_case(fake):
    kinds = ("full-float32", "causal-float32", "full-bfloat16")
    right, refused, wrong = command.answers("jax", chosen(*kinds), seconds=0.01, peer=fake("sdpa"))
    row = right["row"]
    assert row["ratio"] > 0 and "mismatch" not in row["marks"] and row["difference"] < 1e-5
    assert row["threads"] == 1 and set(row["arms"]) == {
        "polyflash", "jax", "polyflash, right after a torch operation",
    }  # fmt: skip
    assert refused == {"name": "jax-causal-float32-512-d128", "reason": "ValueError: no causal here"}
    assert wrong["row"]["ratio"] is None and wrong["row"]["marks"][0] == "mismatch"


def test_a_peer_that_dies_or_hangs_is_absent(fake, monkeypatch):
    (died,) = command.answers("jax", chosen("full-float32"), seconds=0.01, peer=fake("dies"))
    assert died["reason"] == "its process ended with code 3: last words"
    monkeypatch.setattr(command, "_PER_ROW", 0.0)
    hung = list(
        command.answers("jax", chosen("full-float32", "full-float16"), seconds=0.5, peer=fake("hangs"))
    )
    assert [a["reason"] for a in hung] == ["hung: no answer in 1 s"] * 2


def test_cases_survive_the_way_to_the_child():
    for case in cases.rows(cases.SUITES, size="quick"):
        assert pickle.loads(pickle.dumps(case)) == case


def test_peers_are_chosen_by_name(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PEERS, "fake", fake("sdpa"))
    monkeypatch.setitem(PEERS, "gone", Peer("Gone", ("no_such_one",), "x:y"))
    argv = ["bench", "--peers", "fake,gone", "--quick", "--filter", "full", "float32", "--seconds", "0.01"]
    page, file = tmp_path / "page.md", tmp_path / "bench.json"
    assert cli.main([*argv, "--json", str(file), "--page", str(page)]) == 0
    found = json.loads(file.read_text())
    assert [r["name"] for r in found["rows"]] == ["fake-full-float32-512-d128"]
    assert [a["reason"] for a in found["absent"]] == ["no_such_one not installed"]
    out = capsys.readouterr().out
    assert "peer ms" in out and "no_such_one not installed" in " ".join(out.split())
    assert "Gone: gone-full-float32-512-d128: no_such_one not installed" in page.read_text()


SLOW = {"flexattention"}  # compiles for seconds


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in PEERS]
)
def test_the_peers_found_here_compute_attention(name):
    if PEERS[name].absent:
        pytest.skip(PEERS[name].absent)
    answers = command.answers(name, chosen("full-float32", "causal-float32"), seconds=0.01)
    for answer in answers:
        assert "reason" not in answer and "mismatch" not in answer["row"]["marks"]
