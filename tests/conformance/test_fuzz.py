"""Drawn problems and drawn mistakes (testing method §3.9), the same in every run; `make fuzz` draws
others."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyflash
from tests.conformance import calls, draws, guarded
from tests.conformance.draws import Draw

FILES = sorted(draws.STORED.glob("*.json"))


# Lists: with every other rule a draw may have; 0 for keys that are in no list.
DRAWN = {
    "forward": draws.forward_draws(draws.problems()),
    "lists": draws.forward_draws(draws.listed_problems()),
    "packed": draws.forward_draws(draws.packed_problems()),
    "pages": draws.forward_draws(draws.paged_problems()),
    "gradients": draws.gradient_draws(),
}


# By default no head_dim is above 64: the wider kernels are those of the workloads, and compiling more of them
# took longer than all the draws.
NARROW = 64
BY_DEFAULT = pytest.mark.parametrize("whole", (False, pytest.param(True, marks=pytest.mark.slow)))


@BY_DEFAULT
@pytest.mark.parametrize("kind", DRAWN)
def test_fuzz(kind: str, whole: bool):
    narrow = DRAWN[kind].filter(
        lambda drawn: max(drawn.workload.head_dim, drawn.workload.head_dim_v) <= NARROW
    )
    body = given(DRAWN[kind] if whole else narrow)(draws.check_draw)
    settings(max_examples=200 if whole else 60)(body)()


@given(calls.calls())
def test_fuzz_calls(drawn: calls.Call):
    """Odd values in the places of right ones, in every public function."""
    calls.check_call(drawn)


@pytest.mark.parametrize(
    "kind, most", (("dense", 60), ("pages", 30), ("packed", 30), ("known", 12), ("threads", 1))
)
@BY_DEFAULT
def test_fuzz_guarded(kind: str, most: int, whole: bool):
    """Calls between pages that no one may touch, against a reference of its own."""
    drawn = (guarded.drawn(kind, number) for number in itertools.count())
    narrow = (x for x in drawn if all(max(call["dim"], call["dim_v"]) <= NARROW for call in x.calls))
    for each in itertools.islice(drawn if whole else narrow, most):
        guarded.check(each)


def test_a_guarded_draw_survives_its_file(tmp_path: Path):
    for kind in guarded.KINDS:
        drawn = guarded.drawn(kind, 1)
        assert guarded.Draw.read(drawn.text()) == drawn


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a child that may die")
@pytest.mark.parametrize("at_end", (False, True))
@pytest.mark.parametrize("write", (False, True))
def test_a_byte_outside_an_operand_ends_the_process(at_end: bool, write: bool):
    """The guard itself."""
    guarded.place.used = 0
    x = guarded.put(np.ones((3, 5)), torch.float32, ("plain", at_end))
    assert bool((x == 1).all())
    outside = x.data_ptr() + (x.nbytes if at_end else -1)
    child = os.fork()
    if not child:
        faulthandler.disable()
        byte = ctypes.c_char.from_address(outside)
        byte.value = b"x" if write else byte.value
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_stored_draw(path: Path):
    """What once failed, or stands for what did."""
    kinds = {"calls": calls, "guarded": guarded}
    kinds.get(path.stem.partition("-")[0], draws).replay(path)


@given(draws.gradient_draws())
@settings(max_examples=50)
def test_a_draw_survives_its_file(drawn: Draw):
    assert Draw.read(drawn.text()) == drawn


WRONG: dict[str, tuple[Any, ...]] = {
    "causal": ("left", 1.5, None, [True]),
    "window": (3, (1,), (1.5, 2), ("a", 0), (-1, 0)),
    "mask": (torch.zeros(3), "causal", 5, torch.zeros(2, 2, 2, 2, 2, dtype=torch.bool), torch.zeros(7,
    dtype=torch.bool)),
    "bias": (torch.zeros(3, dtype=torch.int32), torch.zeros(7), 1.0, "x"),
    "alibi_slopes": (torch.zeros(9), [0.5, 0.5], torch.zeros(2, dtype=torch.int64)),
    "softcap": (-1.0, float("nan"), float("inf"), "x"),
    "sinks": (torch.zeros(9), 0.0, torch.zeros(1, 2)),
    "scale": (float("nan"), float("inf"), "x", torch.zeros(3)),
    "kv_lens": ([3, 3], torch.tensor((3.0, 3.0)), torch.tensor((3,), dtype=torch.int32), torch.tensor((-1, 3),
    dtype=torch.int32), torch.tensor((3, 99), dtype=torch.int32)),
    "kv_starts": (2, torch.tensor((0.0, 1.0)), torch.tensor((0, 99), dtype=torch.int32)),
    "q_offset": (1.5, "x", torch.tensor((1.0, 2.0)), True),
    "dropout_p": (-0.1, 1.5, float("nan"), "x"),
    "layout": ("sbhd", 3, None),
    "backend": ("cuda-magic", 3),
    "config": (3, {"block_n": 64}, "block_n=64"),
    "out": (torch.zeros(3), torch.zeros(2, 2, 5, 8, dtype=torch.float64), 4),
}  # fmt: skip


@given(
    st.sampled_from([(name, i) for name, values in WRONG.items() for i in range(len(values))]), st.booleans()
)
def test_fuzz_wrong_arguments(case: tuple[str, int], also_causal: bool):
    """Only the two documented errors (and TypeError for what is no argument at all) come out."""
    name, index = case
    q, k, v = (torch.randn(2, 2, n, 8) for n in (5, 6, 6))
    options: dict[str, Any] = {"causal": True} if also_causal and name != "causal" else {}
    options[name] = WRONG[name][index]
    try:
        polyflash.attention(q, k, v, **options)
    except (polyflash.SpecError, polyflash.UnsupportedError, TypeError):
        return
    raise AssertionError(f"{name}={WRONG[name][index]!r} was accepted")


OPERANDS = st.sampled_from(
    (None, 3, "q", [[1.0]], torch.zeros(3), torch.zeros(2, 2, 5, 8, dtype=torch.int32), torch.zeros(2, 2, 5,
    8).bfloat16(),
     torch.zeros(2, 3, 5, 8), torch.zeros(3, 2, 5, 8), torch.zeros(2, 2, 5, 9), torch.zeros(2, 2, 0, 8),
     torch.zeros(2, 2, 5, 8))
)  # fmt: skip


@given(OPERANDS, OPERANDS, OPERANDS)
def test_fuzz_wrong_operands(q: Any, k: Any, v: Any):
    try:
        polyflash.attention(q, k, v)
    except (polyflash.SpecError, polyflash.UnsupportedError, TypeError):
        return
    assert all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, k, v))
    assert q.dtype is k.dtype is v.dtype and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0]
    assert q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0
