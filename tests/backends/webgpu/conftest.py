"""`on`: the WebGPU device. Without one, tests that need it are skipped, and say why."""

from __future__ import annotations

import pytest

from polyflash import target
from polyflash.backends.webgpu import device


@pytest.fixture
def on() -> device.Device:
    here = target.detect("cpu")
    why = here.why_no_package("wgpu")
    why = f"wgpu is {why}" if why else device.why_none()
    if why:
        pytest.skip(why)
    return device.current()
