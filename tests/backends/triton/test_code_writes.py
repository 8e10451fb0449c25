"""A cache whose codes a GPU's quantiser writes in place: what the tests of caches ask of the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyflash import env
from polyflash.backends.triton import quantize
from polyflash.kvcache import code_pools, code_writes
from polyflash.storages import is_readable
from tests.kvcache import test_codes

pytestmark = pytest.mark.skipif(
    not env.TRITON_INTERPRET.is_set(), reason="kernels run on CPU tensors in the interpreter alone"
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What lays writes out; all go to this quantiser, those of tensors on the CPU too."""
    found, made = [], quantize.Writes
    monkeypatch.setattr(code_pools, "quantiser_of", lambda *_: 0)
    monkeypatch.setattr(code_writes, "on_device", lambda x: quantize if is_readable(x) else None)
    monkeypatch.setattr(quantize, "Writes", lambda *x: found.append(x) or made(*x))
    return found


@pytest.mark.parametrize("name", ["int8", "int8-channel", "int4", "rotated", "nf4"])
def test_pieces_are_coded_like_the_whole(name: str, launches: list[Any]):
    test_codes.test_pieces_are_coded_like_the_whole(name, torch.bfloat16)
    assert launches and launches[0][3] == (None if name == "int8" else 2 + (name == "rotated"))


@pytest.mark.parametrize("name", ["int4", "rotated"])
def test_whatever_befalls_a_request(name: str, launches: list[Any]):
    test_codes.test_codes_are_those_of_the_whole_whatever_befalls_a_request(name)
    assert launches


def test_steps_taken_back_and_layers_written_twice(launches: list[Any]):
    for name in ("int8-channel", "int4"):
        test_codes.test_a_step_taken_back_leaves_the_codes_there_were(name)
        test_codes.test_a_layer_written_twice_has_the_codes_of_the_last(name)
        test_codes.test_a_layer_may_be_written_where_it_lies_and_made_ready(name, name == "int4")
    test_codes.test_layers_of_a_step_may_have_strides_of_their_own("int4")
    test_codes.test_a_group_that_was_full_keeps_its_codes_when_cut()
    test_codes.test_rejected_tokens_leave_no_trace()
    test_codes.test_forks_have_values_of_their_own()
    assert launches


@pytest.mark.parametrize("name", ["int4", "rotated"])
def test_keys_are_turned(name: str, launches: list[Any]):
    test_codes.test_keys_are_turned_by_position_before_they_are_coded(name, 32, torch.bfloat16)
    assert launches
