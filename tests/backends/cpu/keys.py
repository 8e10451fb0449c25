"""Every kernel that can run on a target, by what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.backward_configs import BackwardKey, BiasGradientKey
from polyflash.backends.cpu.configs import BUCKETS, ISAS, STORAGE_BYTES, DropoutKey, KernelKey, ScoreKey
from polyflash.backends.cpu.quantize_configs import QuantizeKey, RotateKey
from polyflash.backends.cpu.statistics_configs import StatisticsKey
from polyflash.quant.scheme import KINDS, TABLE_BITS
from polyflash.target import Target


def _keys(cls: type[KernelKey], *stages: type[configs.StageKey], target: Target) -> Iterator[Any]:
    for nv in ISAS[target.arch].group_keys if target.arch in ISAS else ():
        yield from (stage(target.arch, nv) for stage in stages)
        for dtype in STORAGE_BYTES:
            for bucket in BUCKETS:
                yield cls(target.arch, configs.compute_for(dtype, target), dtype, nv, bucket)


def forward(target: Target) -> Iterator[Any]:
    return _keys(KernelKey, ScoreKey, DropoutKey, target=target)


def backward(target: Target) -> Iterator[Any]:
    return _keys(BackwardKey, BiasGradientKey, target=target)


def statistics(target: Target) -> Iterator[Any]:
    return _keys(StatisticsKey, target=target)


def integer(target: Target) -> Iterator[KernelKey]:
    """Those of integer products."""
    if target.arch == "avx512" and "avx512_vnni" in target.features:
        for nv in ISAS[target.arch].group_keys:
            for dtype in STORAGE_BYTES:
                yield from (KernelKey(target.arch, "int8dot", dtype, nv, bucket) for bucket in BUCKETS)


def quantize(target: Target) -> Iterator[QuantizeKey | RotateKey]:
    for storage in STORAGE_BYTES if target.arch in ISAS else ():
        yield RotateKey(target.arch, storage)
        for dtype, kind in KINDS.items():
            for affine in (False, True) if kind.levels else (False,):
                for by_channel in (False, True) if dtype != "mxfp4" else (False,):
                    for rotated, tables in product((False, True), TABLE_BITS):
                        yield QuantizeKey(target.arch, storage, dtype, affine, by_channel, rotated, tables)
