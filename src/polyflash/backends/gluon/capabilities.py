"""Rows of the Gluon engine: what its kernels run on Hopper, and what they leave to the Triton engine."""

from __future__ import annotations

from polyflash.backends.gluon import configs
from polyflash.capability import Capability
from polyflash.spec import MOST_POSITIONS, Feature, Phase

CAPABILITIES = (
    Capability(
        backend="gluon",
        phase=Phase.FORWARD,
        module="polyflash.backends.gluon.forward",
        targets=("cuda:sm90",),
        dtypes=frozenset({"bfloat16", "float16"}),
        max_head_dim=max(configs.HEAD_DIMS),
        features=configs.BOUNDS | configs.CHANGES | {Feature.GQA, Feature.LSE},
        priority=60,
        choose=configs.choose_forward,
        tabled=configs.has_table,
        needs=("triton",),
        max_positions=MOST_POSITIONS,
        refuses=configs.refuses,
        leaves=configs.leaves,
        leaves_sizes=configs.leaves_sizes,
    ),
    Capability(
        backend="gluon",
        phase=Phase.BACKWARD,
        module="polyflash.backends.gluon.backward",
        targets=("cuda:sm90",),
        dtypes=frozenset({"bfloat16", "float16"}),
        max_head_dim=configs.MOST_BACKWARD,
        features=configs.BOUNDS | {Feature.SINKS, Feature.GQA, Feature.LSE},
        priority=60,
        choose=configs.choose_backward,
        tabled=configs.has_table,
        needs=("triton",),
        max_positions=MOST_POSITIONS,
        refuses=configs.refuses,
        leaves=configs.leaves_backward,
        leaves_sizes=configs.leaves_backward_sizes,
    ),
)
