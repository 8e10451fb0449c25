"""Ranks as processes of a gloo group: every case, disagreements, and ranks that are lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import polyflash

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and hasattr(os, "fork")),
    reason="no gloo, or no fork",
)


class Host:
    """The process whose children the ranks are."""

    def __init__(self) -> None:
        path = os.pathsep.join((str(Path(polyflash.__file__).parents[1]), str(ROOT)))
        command = [sys.executable, "-m", "tests.distributed.worker"]
        pipe: Any = subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            process_group=0,
        )

    def wrong(self, suite: str, ranks: int, place: Path) -> list[str]:
        """What went wrong on any rank."""
        patience = threading.Timer(240, self.end)
        patience.start()
        self.process.stdin.write(json.dumps([suite, ranks, str(place)]) + "\n")
        self.process.stdin.flush()
        ended = self.process.stdout.readline()
        patience.cancel()
        said = [(place / f"said-{rank}").read_text(encoding="utf-8") for rank in range(ranks)]
        assert ended and not any(json.loads(ended)), f"{ended} {said}"
        return [text for one in said for text in json.loads(one.strip().splitlines()[-1])]

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    one = Host()
    yield one
    one.end()
    one.process.wait()


@pytest.mark.parametrize("suite", ["some cases", pytest.param("every case", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cases(host: Host, ranks: int, suite: str, tmp_path: Path):
    assert not host.wrong(suite, ranks, tmp_path)


def test_ranks_that_disagree_end_with_the_same_words(host: Host, tmp_path: Path):
    assert not host.wrong("disagreements", 3, tmp_path)


@pytest.mark.parametrize("suite", ["dies in a ring", "hangs in a ring", "dies in a gather"])
def test_a_lost_rank_ends_the_others(host: Host, suite: str, tmp_path: Path):
    assert not host.wrong(suite, 3, tmp_path)


def test_models_of_transformers(host: Host, tmp_path: Path):
    """Mistral and Gemma 3 with windows, gpt-oss with sinks: outputs and gradients of one process."""
    pytest.importorskip("transformers")
    assert not host.wrong("models", 3, tmp_path)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_of_diffusers(host: Host, ranks: int, tmp_path: Path):
    """Flux under diffusers' context parallelism: rings and Ulysses on 2 ranks, both on 4."""
    pytest.importorskip("diffusers")
    assert not host.wrong("diffusion", ranks, tmp_path)


def test_operands_that_are_dtensors(host: Host, tmp_path: Path):
    assert not host.wrong("dtensors", 2, tmp_path)


def test_a_sharded_model_trains_like_a_whole_one(host: Host, tmp_path: Path):
    """Under FSDP2, with a checkpoint."""
    assert not host.wrong("shards", 2, tmp_path)


@pytest.mark.slow
def test_models_train_alike(host: Host, tmp_path: Path):
    """FSDP2 beside context parallelism, checkpoints and torch.compile."""
    assert not host.wrong("training", 4, tmp_path)
