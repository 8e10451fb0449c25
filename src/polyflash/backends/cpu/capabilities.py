"""Rows of the CPU engine."""

from __future__ import annotations

from polyflash.backends.cpu.configs import BUCKETS, choose, dtypes_of
from polyflash.capability import Capability, Yield
from polyflash.spec import Feature, Phase

FORWARD_FEATURES = frozenset(Feature) - {Feature.DROPOUT}

_AMX = Yield(
    target_feature="amx_bf16",
    dtypes=frozenset({"bfloat16"}),
    why="torch's AMX kernels are faster at bf16 prefill than AVX-512 bf16 dot",
)


def _forward(*targets: str) -> Capability:
    return Capability(
        backend="cpu",
        phase=Phase.FORWARD,
        module="polyflash.backends.cpu.forward",
        targets=targets,
        dtypes=frozenset(dtypes_of(targets[0].partition(":")[2])),
        max_head_dim=BUCKETS[-1],
        features=FORWARD_FEATURES,
        priority=100,
        choose=choose,
        needs=("numba",),
        yields=(_AMX,),
    )


CAPABILITIES = (_forward("cpu:avx512", "cpu:avx2", "cpu:neon"), _forward("cpu:generic"))
