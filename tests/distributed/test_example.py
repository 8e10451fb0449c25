"""The example that trains over processes, for a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel.py"
pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and EXAMPLE.exists()),
    reason="needs a checkout, and torch with gloo",
)


def test_two_processes_have_the_losses_of_one():
    done = processes.begun([str(EXAMPLE), "--steps", "4"], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in one process" in done.stdout and "exchange: " in done.stdout
