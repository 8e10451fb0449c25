"""Rows of the CPU engine."""

from __future__ import annotations

from polyflash.backends.cpu.configs import STORAGE_BYTES, choose
from polyflash.capability import Capability, Yield
from polyflash.spec import Feature, Phase

FORWARD_FEATURES = frozenset(
    {
        Feature.CAUSAL,
        Feature.WINDOW,
        Feature.Q_OFFSET,
        Feature.KV_LENS,
        Feature.KV_STARTS,
        Feature.MASK,
        Feature.GQA,
        Feature.LSE,
        Feature.HEAD_DIM_V,
        Feature.BATCH_INVARIANT,
    }
)

CAPABILITIES = (
    Capability(
        backend="cpu",
        phase=Phase.FORWARD,
        module="polyflash.backends.cpu.forward",
        targets=("cpu:avx512",),
        dtypes=frozenset(STORAGE_BYTES),
        max_head_dim=256,
        features=FORWARD_FEATURES,
        priority=100,
        choose=choose,
        needs=("numba",),
        yields=(
            Yield(
                target_feature="amx_bf16",
                dtypes=frozenset({"bfloat16"}),
                why="torch's AMX kernels are faster at bf16 prefill than AVX-512 bf16 dot",
            ),
        ),
    ),
)
