"""Rows of the WebGPU engine. It runs CPU tensors, copied to a device and back, for those who name it; data
that stays on the device are `polyflash.webgpu.GpuTensor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyflash.backends.webgpu import configs
from polyflash.capability import USUAL_FEATURES, Capability
from polyflash.spec import MOST_POSITIONS, Feature, Phase

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

_FORWARD = (USUAL_FEATURES - {Feature.INTERVALS, Feature.ROW_BOUNDS}) | {Feature.CODES}
_ROWS = {
    Phase.FORWARD: _FORWARD,
    Phase.DECODE: _FORWARD - {Feature.VARLEN, Feature.BATCH_INVARIANT, Feature.DROPOUT},
    Phase.BACKWARD: _FORWARD - {Feature.PAGED, Feature.CODES},
}


def leaves(spec: AttentionSpec, target: Target) -> str:
    return "copies CPU tensors to a device and back" if target.kind == "cpu" else ""


def absent(target: Target) -> str:
    """Why no device of this machine runs the kernels."""
    from polyflash.backends.webgpu import device

    return device.why_none()


def adapter() -> str:
    """The adapter, its driver and the version of wgpu, as words."""
    from polyflash.backends.webgpu import device

    return device.described()


CAPABILITIES = tuple(
    Capability(
        backend="webgpu",
        phase=phase,
        module=f"polyflash.backends.webgpu.{phase.value}",
        targets=("webgpu", "cpu:"),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        max_head_dim=configs.MAX_GRADIENT_DIM if phase is Phase.BACKWARD else configs.MAX_HEAD_DIM,
        features=features,
        priority=40,
        choose=configs.choose,
        needs=("wgpu",),
        max_positions=MOST_POSITIONS,
        leaves=leaves,
        absent=absent,
        runs_on=adapter,
    )
    for phase, features in _ROWS.items()
)
