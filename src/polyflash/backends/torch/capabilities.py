"""Rows of the torch backend: every dtype and every feature, on any device, below every other row."""

from __future__ import annotations

from polyflash.backends.torch.configs import choose
from polyflash.capability import Capability
from polyflash.dtypes import BY_NAME
from polyflash.spec import Feature, Phase

CAPABILITIES = tuple(
    Capability(
        backend="torch",
        phase=phase,
        module=f"polyflash.backends.torch.{phase.value}",
        targets=("",),
        dtypes=frozenset(BY_NAME),
        max_head_dim=1 << 20,
        features=frozenset(Feature) - ({Feature.DROPOUT} if phase is Phase.STATISTICS else set()),
        priority=0,
        choose=choose,
    )
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STATISTICS)
)
