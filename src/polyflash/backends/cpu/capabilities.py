"""Rows of the CPU engine."""

from __future__ import annotations

from functools import partial

from polyflash.backends.cpu import backward_configs, decode_codes_configs, decode_configs, integer_configs
from polyflash.backends.cpu.configs import BUCKETS, ISAS, STORAGE_BYTES, choose
from polyflash.capability import USUAL_FEATURES, Capability, Yield
from polyflash.spec import MANY_KEYS, MOST_POSITIONS, Feature, Phase

_row = partial(
    Capability,
    backend="cpu",
    targets=tuple(f"cpu:{isa}" for isa in ISAS),
    dtypes=frozenset(STORAGE_BYTES),
    max_head_dim=BUCKETS[-1],
    priority=100,
    needs=("numba",),
    max_positions=MOST_POSITIONS,
)

NOT_DECODED = frozenset(
    {
        *(Feature.MASK, Feature.BIAS, Feature.ALIBI, Feature.SEGMENTS, Feature.INTERVALS),
        *(Feature.DROPOUT, Feature.VARLEN, Feature.BATCH_INVARIANT),
    }
)

CAPABILITIES = (
    _row(
        phase=Phase.FORWARD,
        module="polyflash.backends.cpu.forward",
        features=(USUAL_FEATURES - {Feature.ROW_BOUNDS}) | {Feature.CODES},
        choose=choose,
        refuses=integer_configs.refuses,
        yields=(
            Yield(
                target_feature="amx_bf16",
                dtypes=frozenset({"bfloat16"}),
                features=frozenset({Feature.GQA}),  # all that the torch row hands over
                why="torch's AMX kernels are faster at dense bf16 prefill of 512 keys or more",
                least_keys=MANY_KEYS,  # below, the look at finite values takes longer than our kernel
            ),
        ),
    ),
    _row(
        phase=Phase.DECODE,
        module="polyflash.backends.cpu.decode",
        features=(USUAL_FEATURES - NOT_DECODED) | {Feature.CODES},
        refuses=decode_codes_configs.refuses,
        choose=decode_configs.choose,
    ),
    _row(
        phase=Phase.BACKWARD,
        module="polyflash.backends.cpu.backward",
        features=(USUAL_FEATURES - {Feature.PAGED, Feature.ROW_BOUNDS}) | {Feature.WIDE_GRADIENTS},
        choose=backward_configs.choose,
    ),
    _row(
        phase=Phase.STATISTICS,
        module="polyflash.backends.cpu.statistics",
        features=USUAL_FEATURES - {Feature.PAGED, Feature.ROW_BOUNDS, Feature.DROPOUT},
        choose=choose,
    ),
)
