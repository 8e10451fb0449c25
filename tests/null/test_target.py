"""Targets as data: what is known of devices that are not here, and what torch's words about one become."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from polyflash import target

GPUS = (
    "cuda:sm80", "cuda:sm86", "cuda:sm89", "cuda:sm90", "cuda:sm100", "cuda:sm120",
    "hip:gfx90a", "hip:gfx942", "hip:gfx950", "hip:gfx1100", "hip:gfx1201",
)  # fmt: skip


@pytest.mark.parametrize("name", GPUS)
def test_known_gpus_have_limits(name: str):
    known = target.parse(name)
    assert known.cores > 1 and known.l2_bytes > 1 << 20 and known.shared_bytes >= 64 << 10
    assert known.warp_size == (64 if known.arch in ("gfx90a", "gfx942", "gfx950") else 32)


def test_cpus_share_nothing_and_run_one_thread():
    cpu = target.parse("cpu:avx512")
    assert (cpu.shared_bytes, cpu.warp_size) == (0, 1)
    assert target.detect("cpu").shared_bytes == 0


@pytest.fixture
def detected(monkeypatch: pytest.MonkeyPatch):
    """What `detect` makes of the properties torch reports, without a device."""

    def detect(hip: str | None = None, **said: object) -> target.Target:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**said))
        monkeypatch.setattr(torch.version, "hip", hip)
        target.detect.cache_clear()
        return target.detect("cuda", 0)

    yield detect
    target.detect.cache_clear()


def test_a_gpu_is_what_torch_says(detected):
    here = detected(
        major=9, minor=0, multi_processor_count=114, L2_cache_size=7 << 20,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=200 << 10,
    )  # fmt: skip
    assert (here.name, here.kind, here.arch) == ("cuda:sm90", "cuda", "sm90")
    assert (here.cores, here.l2_bytes, here.shared_bytes, here.warp_size) == (114, 7 << 20, 200 << 10, 32)
    assert [name for name, _ in here.packages] == ["numba", "triton", "wgpu"]


def test_what_an_older_torch_does_not_say_is_that_of_a_known_device(detected):
    here = detected(major=8, minor=0, multi_processor_count=98)
    assert (here.cores, here.l2_bytes, here.shared_bytes) == (98, 40 << 20, 163 << 10)


def test_an_unknown_gpu_has_the_least_there_is(detected):
    here = detected(major=13, minor=7, multi_processor_count=3)
    assert (here.name, here.cores, here.shared_bytes) == ("cuda:sm137", 3, 48 << 10)
    here = detected(major=13, minor=7, multi_processor_count=3, shared_memory_per_block=60 << 10)
    assert here.shared_bytes == 60 << 10


def test_an_amd_gpu_is_named_by_its_code(detected):
    said = {"gcnArchName": "gfx942:sramecc+:xnack-", "major": 9, "minor": 4, "multi_processor_count": 300}
    here = detected("6.4", **said, shared_memory_per_block=64 << 10, shared_memory_per_block_optin=0)
    assert (here.name, here.cores, here.shared_bytes, here.warp_size) == ("hip:gfx942", 300, 64 << 10, 64)


def test_triton_is_found_under_any_of_its_names(monkeypatch: pytest.MonkeyPatch):
    from importlib import metadata

    def version(name: str) -> str:
        if name != "pytorch-triton-rocm":
            raise metadata.PackageNotFoundError(name)
        return "3.7.1+gita"

    monkeypatch.setattr(metadata, "version", version)
    assert target.installed_version("triton") == "3.7.1+gita" and target.installed_version("numba") == ""
    old, new = (target.Target("cuda:sm90", packages=(("triton", v),)) for v in ("3.5.1", "3.7.1+gita"))
    assert new.has_package("triton") and "older than 3.6" in old.why_no_package("triton")
