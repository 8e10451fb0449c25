"""Where the rows under test run: `pytest --device cuda` takes the operands of every public call to a GPU and
its results back, gradients included, so that tests stay as they are.

Operands keep their strides, offsets and shared storages on the way, and what a call wrote into one comes
back. `--device copies` does the same with copies on the CPU, which proves the way itself without a GPU.

`--default-device cuda` is for tests of whole models and caches: it is torch's default device then, so that
what they make is made there, and stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import Mask, QuantizedTensor, target

VARIABLE, BY_DEFAULT = "POLYFLASH_TEST_DEVICE", "POLYFLASH_TEST_DEFAULT_DEVICE"
ONE_BACKEND, ONE_ADAPTER, ONE_ISA = "POLYFLASH_TEST_ROWS", "POLYFLASH_TEST_ADAPTER", "POLYFLASH_TEST_ISA"
CALLS = (
    "attention", "attention_varlen", "attention_paged", "attention_groups", "explain", "explain_groups",
    "column_sums", "row_stats",
)  # fmt: skip


def _asked(option: str, variable: str) -> str:
    """Read off the command line, as rows are listed before pytest has parsed it; workers of pytest-xdist find
    it in the environment."""
    for word, after in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if word == option or word.startswith(f"{option}="):
            return after if word == option else word.partition("=")[2]
    return os.environ.get(variable, "")


DEFAULT = os.environ[BY_DEFAULT] = _asked("--default-device", BY_DEFAULT)
NAME = os.environ[VARIABLE] = DEFAULT or _asked("--device", VARIABLE) or "cpu"
ROWS = os.environ[ONE_BACKEND] = _asked("--rows", ONE_BACKEND)  # "": those of every backend
ADAPTER = os.environ[ONE_ADAPTER] = _asked("--adapter", ONE_ADAPTER)  # "": those of wgpu
ISA = os.environ[ONE_ISA] = _asked("--isa", ONE_ISA)  # "": that of the CPU
DEVICE = torch.device("cpu" if NAME == "copies" else NAME)
ON_A_CPU = DEVICE.type == "cpu"
if DEFAULT:
    torch.set_default_device(DEVICE)  # before test modules make their tensors


# Contents of tables on a GPU are looked at when a call asks for it.
CONTENTS = (False, True) if DEVICE.type == "cpu" else (True,)


def here() -> target.Target:
    """The target of the device under test."""
    return target.detect(DEVICE.type, DEVICE.index or 0)


def install() -> None:
    """From now on the public functions take CPU tensors to the device under test."""
    if NAME == "cpu" or DEFAULT:
        return
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # else cuBLAS complains of poisoned memory's mode
    for name in CALLS:
        setattr(polyflash, name, elsewhere(getattr(polyflash, name)))


# What holds on a CPU alone, of the tests that run with another default device; by a part of their names.
OF_A_CPU = {
    "test_default_device.py": "the default device is its subject",
    "test_threads.py": "torch's default device is that of a thread",
    "test_python_threads_share": "torch's default device is that of a thread",
    "test_machine.py": "thousands of steps of an allocator that knows no device",
    "test_pools_may_be_huge_pages": "a CPU's memory",
    "test_PF24_pools_beyond": "a CPU's memory; scripts/gpu_check.py has `far`",
    "test_rope.py::test_what_does_not_fit": "positions on a device are not read",
    "test_sdpa_gpus.py": "fakes stand for a GPU",
    "test_diffusers.py::test_gradients_are_within_the_rule": "torch's flash kernel, the peer, has no float32",
    "test_diffusers.py::test_compiled_in_one_graph": "torch.compile does not trace `unflatten` under one",
    "test_diffusers.py::test_a_unet": "convolutions round to TF32 there",
    "test_calls_of_other_libraries_equal_ours": "pages make tensors as their readers do, on the CPU",
    "test_sdpa.py::TestRegistry": "of float32; scripts/gpu_doors.py has `registry`",
    "test_errors_are_torchs": "torch's errors differ by device",
    "test_what_polyflash_does_not_run_is_torchs": "what torch allows differs by device",
    "test_flash_attn.py::test_what_is_refused": "contents on a device are not read",
    "test_a_refused_call_leaves": "contents on a device are not read",
    "test_pages_at_capacity": "contents on a device are not read",
    "test_flash_attn_arguments.py": "arguments, not devices",
    "test_transformers.py": "masks that are asked for on the CPU",
    "test_a_mask_made_while_tracing": "masks that are asked for on the CPU",
    "test_transformers_memory.py": "a CPU's memory",
    "test_train_characters.py": "an example that chooses its device",
    "test_the_example_draws": "an example that chooses its device",
    "test_a_known_call_refuses": "contents on a device are not read",
    "test_a_call_within_a_call": "memory of the CPU engine",
    "test_a_known_call_reads_the_strides": "on a device strides are part of what is known",
    "test_a_growing_cache_adds_nothing": "on a device lengths are part of what is known",
    "test_known_calls_over_pages_give": "on a device the table's shape is part of what is known",
    "test_tables_of_other_widths": "on a device the table's shape is part of what is known",
    "test_fewer_keys_than_a_walk": "of the CPU engine's two kernels",
    "test_a_named_backend_is_obeyed": "names the CPU engine",
}


def generator(seed: int) -> torch.Generator:
    """For tensors of torch's default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def skip_elsewhere(items: list[pytest.Item]) -> None:
    """Skips what holds on a CPU only, where another device is the default one."""
    for item in items if DEFAULT and not ON_A_CPU else ():
        for word, why in OF_A_CPU.items():
            if word in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=why))


def elsewhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on the device under test, for CPU tensors."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        trip = Trip()  # seeds stay on the CPU
        there = {n: x if n == "dropout_seed" else trip.there(x) for n, x in options.items()}
        result = function(*(trip.there(x) for x in args), **there)
        trip.bring_writes()
        return trip.back(result)

    return call


class Trip:
    """One call's tensors on their way to the device and back."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[Tensor, Tensor]] = {}  # bytes here and there, by address
        self.given: list[tuple[Tensor, Tensor]] = []

    def there(self, x: Any) -> Any:
        if isinstance(x, QuantizedTensor) and x.requires_grad and torch.is_grad_enabled():
            return replace(x.to(DEVICE), source=_There.apply(x.source, self))
        if isinstance(x, (Mask, QuantizedTensor)):
            return x.to(DEVICE)
        if isinstance(x, (list, tuple)) and any(isinstance(y, Tensor) for y in x):
            return type(x)(self.there(y) for y in x)
        if type(x) not in (Tensor, torch.nn.Parameter) or x.device.type != "cpu" or x.layout != torch.strided:
            return x
        if x.requires_grad and torch.is_grad_enabled():
            return _There.apply(x, self)
        copy = self.copy(x)
        self.given.append((x, copy))
        return copy

    def copy(self, x: Tensor) -> Tensor:
        """The same view of a copy of its storage."""
        storage = x.untyped_storage()
        if storage.nbytes() == 0:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
        if storage.data_ptr() not in self.storages:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages[storage.data_ptr()] = flat, flat.to(DEVICE, copy=True)
        moved = self.storages[storage.data_ptr()][1].untyped_storage()
        made = torch.empty(0, dtype=x.dtype, device=DEVICE)
        made.set_(moved, x.storage_offset(), x.shape, x.stride())
        return torch._neg_view(made) if x.is_neg() else made

    def bring_writes(self) -> None:
        """What the call changed in a storage, which is its `out` or a mistake."""
        for flat, moved in self.storages.values():
            after = moved.cpu()
            if not torch.equal(after, flat):
                flat.copy_(after)

    def back(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            for x, copy in self.given:
                if result is copy:
                    return x
            return result.cpu() if DEVICE.type != "cpu" else result
        if isinstance(result, tuple):
            parts = [self.back(x) for x in result]
            return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        return [self.back(x) for x in result] if isinstance(result, list) else result


class _There(torch.autograd.Function):
    """The way there of a tensor that needs gradients; they come back as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: Trip) -> Tensor:
        return trip.copy(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.cpu(), None
