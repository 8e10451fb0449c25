"""Rows of the CPU engine."""

from __future__ import annotations

from polyflash.backends.cpu import backward_configs, decode_configs
from polyflash.backends.cpu.configs import BUCKETS, ISAS, STORAGE_BYTES, choose
from polyflash.capability import USUAL_FEATURES, Capability, Yield
from polyflash.spec import MOST_POSITIONS, Feature, Phase

CAPABILITIES = (
    Capability(
        backend="cpu",
        phase=Phase.FORWARD,
        module="polyflash.backends.cpu.forward",
        targets=tuple(f"cpu:{isa}" for isa in ISAS),
        dtypes=frozenset(STORAGE_BYTES),
        max_head_dim=BUCKETS[-1],
        features=USUAL_FEATURES - {Feature.ROW_BOUNDS},
        priority=100,
        choose=choose,
        needs=("numba",),
        max_positions=MOST_POSITIONS,
        yields=(
            Yield(
                target_feature="amx_bf16",
                dtypes=frozenset({"bfloat16"}),
                features=frozenset({Feature.GQA}),  # all that the torch row hands over
                why="torch's AMX kernels are faster at dense bf16 prefill than AVX-512 bf16 dot",
            ),
        ),
    ),
    Capability(
        backend="cpu",
        phase=Phase.DECODE,
        module="polyflash.backends.cpu.decode",
        targets=tuple(f"cpu:{isa}" for isa in ISAS),
        dtypes=frozenset(STORAGE_BYTES),
        max_head_dim=BUCKETS[-1],
        features=USUAL_FEATURES
        - {
            Feature.MASK,
            Feature.BIAS,
            Feature.ALIBI,
            Feature.SEGMENTS,
            Feature.INTERVALS,
            Feature.DROPOUT,
            Feature.VARLEN,
            Feature.BATCH_INVARIANT,
        },
        priority=100,
        choose=decode_configs.choose,
        needs=("numba",),
        max_positions=MOST_POSITIONS,
    ),
    Capability(
        backend="cpu",
        phase=Phase.BACKWARD,
        module="polyflash.backends.cpu.backward",
        targets=tuple(f"cpu:{isa}" for isa in ISAS),
        dtypes=frozenset(STORAGE_BYTES),
        max_head_dim=BUCKETS[-1],
        features=USUAL_FEATURES - {Feature.PAGED, Feature.ROW_BOUNDS},
        priority=100,
        choose=backward_configs.choose,
        needs=("numba",),
        max_positions=MOST_POSITIONS,
    ),
    Capability(
        backend="cpu",
        phase=Phase.STATISTICS,
        module="polyflash.backends.cpu.statistics",
        targets=tuple(f"cpu:{isa}" for isa in ISAS),
        dtypes=frozenset(STORAGE_BYTES),
        max_head_dim=BUCKETS[-1],
        features=USUAL_FEATURES - {Feature.PAGED, Feature.ROW_BOUNDS, Feature.DROPOUT},
        priority=100,
        choose=choose,
        needs=("numba",),
        max_positions=MOST_POSITIONS,
    ),
)
