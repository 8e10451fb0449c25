"""What code for fewer registers must carry as the widest does; what keeps kernels of two targets apart."""

from __future__ import annotations

import math
import platform

import pytest
import torch

import polyflash
from polyflash import target
from polyflash.backends.cpu import configs, runtime
from polyflash.backends.cpu.configs import Config, ScoreKey

HERE = target.host_arch()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 CPU")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_a_narrower_set_carries_nan(dtype: torch.dtype):
    """A NaN in a query makes its row NaN, one in a key the rows that see it, with 2**n made of bits too."""
    if "avx2" not in configs._RUNS[HERE] or not target.detect("cpu").has_package("numba"):
        pytest.skip(f"{HERE} does not run avx2")
    q, k, v = (torch.randn(1, 1, 40, 16).to(dtype) for _ in range(3))
    q[0, 0, 7, 3] = math.nan
    k[0, 0, 30, 2] = math.nan
    options = {"return_lse": True, "backend": "cpu", "config": Config(32, 2, isa="avx2"), "causal": True}
    out, lse = polyflash.attention(q, k, v, **options)
    hit = torch.arange(40) >= 30
    hit[7] = True
    assert torch.equal(out[0, 0].isnan().all(-1), hit) and torch.equal(out[0, 0].isnan().any(-1), hit)
    assert torch.equal(lse[0, 0].isnan(), hit)


def test_cache_key_has_the_features_of_the_target(monkeypatch: pytest.MonkeyPatch):
    """S16: what is planned for a target with other features has entries of its own, under the same name."""
    detected = target.detect("cpu")
    names = set()
    for features in (frozenset(), frozenset({"avx512_bf16"}), frozenset({"avx512_bf16", "amx_bf16"})):
        other = target.replace(detected, features=features)
        monkeypatch.setattr(runtime.target, "detect", lambda _, other=other: other)
        names.add(runtime.entry_name(ScoreKey("avx2", 1)))
    assert len(names) == 3
