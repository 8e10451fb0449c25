"""The kernels on a Hopper GPU, in child processes that are killed when they hang: `--device cuda`."""

from __future__ import annotations

import pytest

from tests import device
from tests.backends.gluon import guarded

HERE = device.DEVICE.type == "cuda" and device.here().name == "cuda:sm90"
pytestmark = pytest.mark.skipif(not HERE, reason="no Hopper GPU is under test")


@pytest.mark.parametrize("name", guarded.ALONE)
def test_alone(name: str):
    assert not guarded.in_child([name], guarded.SECONDS, 1, [])


def test_under_contention():
    names = [f"{guarded.KINDS[i % len(guarded.KINDS)]}-{i}" for i in range(8)]
    assert not guarded.in_child(names, guarded.SECONDS + 20, 8, ["--contend", "1", "--seconds", "15"])
