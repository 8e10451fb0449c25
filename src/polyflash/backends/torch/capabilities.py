"""Rows of the torch backend: every dtype, on any device, below every other row; forward every feature."""

from __future__ import annotations

from polyflash.backends.torch.configs import choose
from polyflash.capability import USUAL_FEATURES, Capability
from polyflash.dtypes import BY_NAME
from polyflash.spec import Feature, Phase

_FEATURES = {
    Phase.FORWARD: USUAL_FEATURES,
    Phase.BACKWARD: (USUAL_FEATURES - {Feature.PAGED, Feature.ROW_BOUNDS}) | {Feature.WIDE_GRADIENTS},
    Phase.STATISTICS: USUAL_FEATURES - {Feature.PAGED, Feature.ROW_BOUNDS, Feature.DROPOUT},
}

CAPABILITIES = tuple(
    Capability(
        backend="torch",
        phase=phase,
        module=f"polyflash.backends.torch.{phase.value}",
        targets=("",),
        dtypes=frozenset(BY_NAME),
        max_head_dim=1 << 20,
        features=features,
        host_features=frozenset({Feature.BATCH_INVARIANT}),  # a GPU's matrix products follow the batch
        priority=0,
        choose=choose,
    )
    for phase, features in _FEATURES.items()
)
