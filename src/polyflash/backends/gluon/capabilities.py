"""Rows of the Gluon engine: what its kernels run on Hopper, and what they leave to the Triton engine."""

from __future__ import annotations

from functools import partial

from polyflash.backends.gluon import configs
from polyflash.capability import Capability
from polyflash.spec import MOST_POSITIONS, Feature, Phase

_row = partial(
    Capability,
    backend="gluon",
    targets=("cuda:sm90",),
    dtypes=frozenset({"bfloat16", "float16"}),
    priority=60,
    tabled=configs.has_table,
    needs=("triton",),
    max_positions=MOST_POSITIONS,
    refuses=configs.refuses,
)

CAPABILITIES = (
    _row(
        phase=Phase.FORWARD,
        module="polyflash.backends.gluon.forward",
        max_head_dim=max(configs.HEAD_DIMS),
        features=configs.BOUNDS | configs.CHANGES | {Feature.GQA, Feature.LSE},
        choose=configs.choose_forward,
        by_sizes=configs.by_sizes,
        leaves=configs.leaves,
        leaves_sizes=configs.leaves_sizes,
    ),
    _row(
        phase=Phase.FORWARD,
        label="fp8",
        module="polyflash.backends.gluon.fp8",
        max_head_dim=max(configs.FP8),
        features=configs.BOUNDS - {Feature.VARLEN} | {Feature.CODES, Feature.SINKS, Feature.GQA, Feature.LSE},
        choose=configs.choose_fp8,
        tabled=lambda spec, target: spec.head_dim in configs.FP8,
        refuses=configs.refuses_fp8,
    ),
    _row(
        phase=Phase.BACKWARD,
        module="polyflash.backends.gluon.backward",
        max_head_dim=configs.MOST_BACKWARD,
        features=configs.BOUNDS | configs.CHANGES | {Feature.GQA, Feature.LSE},
        choose=configs.choose_backward,
        leaves=configs.leaves_backward,
        leaves_sizes=configs.leaves_backward_sizes,
    ),
)
