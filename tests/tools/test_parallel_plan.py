"""`polyflash parallel-plan`: figures that follow from its rates by hand, and what it refuses."""

from __future__ import annotations

import json

import pytest

from polyflash.cli import main
from polyflash.parallel.command import Line


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[tuple[int, int, str], Line]:
    assert main(["parallel-plan", "--json", *words]) == 0
    rows = [Line(**row) for row in json.loads(capsys.readouterr().out)]
    return {(row.tokens, row.ranks, row.method): row for row in rows}


def test_compute_is_that_of_the_visible_pairs(capsys: pytest.CaptureFixture[str]):
    """4·D FLOPs per pair and head forward, 10·D backward; half of all pairs are visible."""
    lines = planned(capsys, "--tokens", "1048576", "--ranks", "8", "--tflops", "100", "--heads", "32/8")
    flops = 14 * 128 * 32 * (1 << 40) / 2
    for method in ("ring", "all_gather", "ulysses"):
        line = lines[1 << 20, 8, method]
        assert line.computing == pytest.approx(flops / 8 / 1e14, rel=1e-5)
        assert line.seconds >= line.computing


def test_links_between_nodes_are_felt(capsys: pytest.CaptureFixture[str]):
    """16 ranks in two nodes: a gather brings keys to a node once, a ring brings them to every rank."""
    size = ("--tokens", "1048576", "--ranks", "16", "--tflops", "1e9")  # nothing but exchange is left
    slow = planned(capsys, *size, "--link", "450GB/s,80Gb/s")
    fast = planned(capsys, *size, "--link", "450GB/s")
    # K and V forward, and again with float32 gradients: 4 times those in bfloat16
    whole = 4 * (1 << 20) * 8 * 256 * 2
    assert fast[1 << 20, 16, "all_gather"].seconds == pytest.approx(whole * 15 / 16 / 450e9, rel=0.01)
    assert slow[1 << 20, 16, "all_gather"].seconds == pytest.approx(whole / 2 / (8 * 10e9), rel=0.01)
    assert slow[1 << 20, 16, "ring"].seconds > 5 * slow[1 << 20, 16, "ulysses+ring"].seconds
    assert (1 << 20, 16, "ulysses+ring") not in fast


def test_the_quickest_that_fits_is_chosen(capsys: pytest.CaptureFixture[str]):
    lines = planned(capsys, "--tokens", "1e6..1e7", "--ranks", "8..64", "--heads", "12/4").values()
    for tokens, ranks in {(line.tokens, line.ranks) for line in lines}:
        own = [line for line in lines if (line.tokens, line.ranks) == (tokens, ranks) and not line.refused]
        best = [line for line in own if line.chosen]
        fitting = [line.seconds for line in own if line.fits]
        assert [line.seconds for line in best] == ([min(fitting)] if fitting else [])
    assert {line.refused for line in lines if line.method == "ulysses"} == {
        f"12 heads do not divide by {n} ranks" for n in (8, 64)
    }


def test_a_window_is_cheap(capsys: pytest.CaptureFixture[str]):
    size = ("--tokens", "1e6", "--ranks", "64")
    whole, near = planned(capsys, *size), planned(capsys, *size, "--window", "4095")
    key = (10**6, 64, "ring")
    assert near[key].sent < whole[key].sent / 50 and near[key].seconds < whole[key].seconds / 50


def test_tables_say_what_they_assume(capsys: pytest.CaptureFixture[str]):
    assert main(["parallel-plan", "--tokens", "1e6", "--ranks", "8..64"]) == 0
    said = capsys.readouterr().out
    assert "nothing below was measured" in said and "ulysses+ring" in said and "450 TFLOP/s" in said
    assert max(map(len, said.splitlines())) <= 110


@pytest.mark.parametrize(
    "words",
    [("--tokens", "0.5"), ("--tokens", "9..3"), ("--link", "450"), ("--link", "1GB/s,1GB/s,1GB/s")],
)
def test_usage(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert main(["parallel-plan", *words]) == 2
    assert "wanted" in capsys.readouterr().err


def test_nodes_have_ranks(capsys: pytest.CaptureFixture[str]):
    assert main(["parallel-plan", "--node", "0"]) == 2
    assert "--node" in capsys.readouterr().err


def test_a_rate_is_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["parallel-plan", "--link", "5"]) == 2
    assert "got '5', wanted a rate in" in (said := capsys.readouterr().err) and "450GB/s" in said
