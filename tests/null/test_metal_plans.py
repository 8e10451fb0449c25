"""Plans, configs and texts of the Metal engine, without a Mac and without a compiler."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import polyflash
from polyflash import env, target
from polyflash.advice import Advice
from polyflash.backends.metal import configs, render, report, uniforms
from polyflash.backends.metal.capabilities import CAPABILITIES, UNPROVEN
from polyflash.spec import AttentionSpec, Phase
from polyflash.target import parse

M3 = parse("metal:m3")
CHOOSE = {row.phase: row for row in CAPABILITIES}


def spec_of(phase: Phase, head_dim: int, head_dim_v: int = 0, rows: int = 100) -> AttentionSpec:
    dims = head_dim, head_dim_v or head_dim
    return AttentionSpec(phase, "float32", "mps", 1, 4, 2, rows, 300, *dims, frozenset())


@pytest.mark.parametrize("phase", CHOOSE)
def test_every_choice_fits_threadgroup_memory(phase: Phase):
    row = CHOOSE[phase]
    dims = [d for d in (1, 16, 59, 64, 96, 111, 128, 129, 160, 192, 255, 256) if d <= row.max_head_dim]
    for head_dim in dims:
        for head_dim_v in dims:
            for rows in (1, 9, 17, 5000):
                spec = spec_of(phase, head_dim, head_dim_v, rows)
                first, *others = configs.candidates(spec, M3)
                assert first == row.choose(spec, M3) and first not in others
                assert all(configs.fits(config, spec) for config in (first, *others))
                configs.check_memory(first, spec)


def test_memory_is_what_the_text_declares():
    """Bytes of the arrays in threadgroup memory, read off the kernel, are those that `shared_bytes` says."""
    names = {
        "DIM": 48,
        "DIM_V": 32,
        "PAD": 4,
        "BLOCK_M": 32,
        "BLOCK_N": 16,
        "STAGES": 2,
        "OWN": 32,
        "WALK": 16,
    }
    size = {"float4": 16, "float": 4, "int": 4}
    config = configs.ForwardConfig(32, 16, stages=2)
    gradients = configs.BackwardConfig(16, 32, 32, 16)
    for name, told in (
        ("forward", config.shared_bytes(spec_of(Phase.FORWARD, 40, 32))),
        ("backward", gradients.shared_bytes(spec_of(Phase.BACKWARD, 40, 32))),
    ):
        arrays = re.findall(r"^  threadgroup (\w+) \w+\[(.*)\];$", render.kernel_text(name), re.MULTILINE)
        counted = 0
        for kind, count in arrays:
            for word, value in names.items():
                count = re.sub(rf"\b{word}\b", str(value), count)
            numbers = re.fullmatch(r"[\d\s*+/()]+", count)
            assert numbers, count
            counted += size[kind] * _value(count)
        assert counted == told, name


def _value(text: str) -> int:
    """A product of numbers and sums of numbers, the last factor perhaps a quotient."""
    product, _, quotient = text.partition("/")
    value = 1
    for factor in re.findall(r"\(([^)]*)\)|(\d+)", product):
        value *= sum(map(int, factor[0].split("+"))) if factor[0] else int(factor[1])
    return value // int(quotient or 1)


def test_documented_features_alone():
    """No assembly, no undocumented intrinsics, no elements of matrices, no device atomics."""
    for name in {file for files in render.FILES.values() for file in files}:
        code = re.sub(r"//.*", "", render.kernel_text(name))
        found = re.search(r"__asm|asm\(|\bair\.|thread_elements|simdgroup_async|simdgroup_event|atomic", code)
        assert not found, f"{name}: {found}"


def test_structs_are_printed_from_the_tuples():
    text = uniforms.struct_text()
    assert "struct View { long b, h, s, d; };" in text and "float factor;" in text
    fields = re.search(r"struct Numbers \{ (.*) \};", text)
    assert fields and [f.split()[-1] for f in fields[1].rstrip("; ").split(";")] == list(
        uniforms.Numbers._fields
    )


def test_a_text_names_its_constants_once():
    for kernel in render.FILES:
        text = render.source(kernel, render.Constants("half", "half", "half", 64, 64))
        assert f"kernel void {kernel}(" in text and text.count("typedef half T;") == 1
        assert text.count("{") == text.count("}") and not re.search(r"\bNone\b|\bTrue\b", text)


@pytest.mark.parametrize("values", [(12, 16), (32, 7), (32, 128)])
def test_configs_prove_themselves(values: tuple[int, int]):
    with pytest.raises(polyflash.SpecError, match="a power of two from 8 to 64"):
        configs.ForwardConfig(*values)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: configs.ForwardConfig(16, 16, split_exp=4), "parts of 8 keys or more of block_n 16"),
        (lambda: configs.DecodeConfig(8, 16, 8), r"a power of two from block_n \(16\) on"),
        (lambda: configs.ForwardConfig(16, 16, split_keys=64), "Only a DecodeConfig has splits"),
    ],
)
def test_refusals_of_configs(make: Any, words: str):
    with pytest.raises(polyflash.SpecError, match=words):
        make()


class TestPlans:
    def test_on_any_machine(self):
        q, k = torch.empty(1, 8, 64, 64), torch.empty(1, 2, 64, 64)
        plan = polyflash.explain(q, k, k, causal=True, target="metal:m3", backend="metal")
        assert plan.backend == "metal" and "of threadgroup memory" in str(plan)
        step = polyflash.explain(q[:, :, :1], k, k, target="metal:m1", backend="metal")
        assert step.chosen.name == "metal/decode" and step.config.pack_gqa

    def test_what_it_lacks_is_the_torch_rows(self):
        q = torch.empty(1, 2, 8, 300)
        plan = polyflash.explain(q, q, q, target="metal:m3")
        assert plan.backend == "torch"
        reasons = next(v.reasons for v in plan.verdicts if v.row.name == "metal/forward")
        assert reasons == ("head_dim: up to 256, asked for 300", f"yields: {UNPROVEN}")

    def test_nobody_gets_it_unasked(self):
        """Until a Mac has run it."""
        q = torch.empty(1, 2, 64, 64)
        assert polyflash.explain(q, q, q, target="metal:m3").backend == "torch"

    @pytest.mark.parametrize(
        ("said", "name", "cores"),
        [("Apple M3 Max", "metal:m3", 10), ("Apple M12", "metal:m12", 8), ("", "metal:generic", 8)],
    )
    def test_the_chip_by_its_name(self, said: str, name: str, cores: int, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(target, "_sysctl", lambda _: said)
        found = target.detect.__wrapped__("mps")
        assert (found.name, found.cores, found.shared_bytes) == (name, cores, 32 << 10)
        assert all(found.name.startswith(row.targets) for row in CAPABILITIES)


@pytest.mark.parametrize(
    ("probed", "fast", "words"),
    [
        ({"mps_built": True, "mps": True}, "", ()),
        ({"mps_built": False, "mps": False}, "", ("built without MPS",)),
        ({"mps_built": True, "mps": False}, "", ("sees no MPS device",)),
        ({"mps_built": True, "mps": True}, "1", ("drop NaN",)),
        ({"error": "no torch"}, "1", ()),
    ],
)
def test_advice_on_a_mac(
    probed: dict[str, Any], fast: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(env.PYTORCH_MPS_FAST_MATH.name, fast)
    monkeypatch.setattr(report.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(report.platform, "machine", lambda: "arm64")
    found = list(report.advice(probed))
    assert len(found) == len(words) and all(isinstance(a, Advice) for a in found)
    assert all(word in a.what for word, a in zip(words, found, strict=True))
    assert report.facts()["metal"]()["target"].startswith("metal:")
    monkeypatch.setattr(report.platform, "system", lambda: "Linux")
    assert not list(report.advice(probed)) and not report.facts()


def test_other_sizes_for_other_dtypes_are_not_needed():
    """Tiles are float32 whatever q is: memory does not depend on the dtype."""
    spec = spec_of(Phase.FORWARD, 64)
    sizes = {configs.ForwardConfig(32, 32).shared_bytes(replace(spec, dtype=d)) for d in render.TYPES}
    assert len(sizes) == 1
