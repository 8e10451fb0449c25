"""Ranks as processes of a gloo group: every case, disagreements, and ranks that are lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polyflash

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch without gloo",
)


def launched(suite: str, ranks: int, place: Path) -> list[list[str]]:
    """What went wrong on each rank."""
    path = os.pathsep.join((str(Path(polyflash.__file__).parents[1]), str(ROOT)))
    command = [sys.executable, "-m", "tests.distributed.worker"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(place / "rendezvous"), suite],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = []
        for worker in workers:
            out, err = worker.communicate(timeout=240)
            assert worker.returncode == 0, out + err
            said.append(json.loads(out.strip().splitlines()[-1]))
        return said
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_case(ranks: int, tmp_path: Path):
    assert not [text for said in launched("cases", ranks, tmp_path) for text in said]


def test_ranks_that_disagree_end_with_the_same_words(tmp_path: Path):
    assert not [text for said in launched("disagreements", 3, tmp_path) for text in said]


@pytest.mark.parametrize("suite", ["dies in a ring", "hangs in a ring", "dies in a gather"])
def test_a_lost_rank_ends_the_others(suite: str, tmp_path: Path):
    assert not [text for said in launched(suite, 3, tmp_path) for text in said]


def test_models_of_transformers(tmp_path: Path):
    """Mistral and Gemma 3 with windows, gpt-oss with sinks: outputs and gradients of one process."""
    pytest.importorskip("transformers")
    assert not [text for said in launched("models", 3, tmp_path) for text in said]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_of_diffusers(ranks: int, tmp_path: Path):
    """Flux under diffusers' context parallelism: rings and Ulysses on 2 ranks, both on 4."""
    pytest.importorskip("diffusers")
    assert not [text for said in launched("diffusion", ranks, tmp_path) for text in said]


def test_operands_that_are_dtensors(tmp_path: Path):
    assert not [text for said in launched("dtensors", 2, tmp_path) for text in said]


@pytest.mark.slow
def test_models_train_alike(tmp_path: Path):
    """FSDP2 beside context parallelism, checkpoints and torch.compile."""
    assert not [text for said in launched("training", 4, tmp_path) for text in said]
