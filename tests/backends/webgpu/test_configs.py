"""Which variant is legal where, and what the planner says of the rows: no device is asked but by `tune`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import polyflash
from polyflash import SpecError, target
from polyflash.backends.webgpu import configs, render
from polyflash.backends.webgpu.backward import kernels_of
from polyflash.backends.webgpu.calls import Sizes
from polyflash.backends.webgpu.configs import AUTO, FLOOR, ROW, TILE, Config, Limits, Variant
from polyflash.backends.webgpu.device import Device
from polyflash.backends.webgpu.forward import Plan, kernel_of
from polyflash.cli import main
from polyflash.reference import attention_reference
from polyflash.tuning import command, search, store

WIDE = Limits(32 << 10, 1024, subgroup=32)
DIMS = ((1, 1), (4, 4), (16, 16), (16, 12), (32, 32), (64, 16), (128, 128))
_FLAGS = {"ELEMENTS": 0, "CHANGED": 0, "MASK": 0, "BIAS": 0}


def workgroup_bytes_of(text: str) -> int:
    """Bytes of all `var<workgroup>` of a kernel's text."""
    constants = {name: int(x) for name, x in re.findall(r"const (\w+): u32 = (\d+)u;", text)}
    total = 0
    for kind, count in re.findall(r"var<workgroup> \w+: array<([\w<>]+), ([^>;]+)>;", text):
        product = 1
        for name in count.split(" * "):
            product *= constants[name]
        total += product * {"f32": 4, "vec2<f32>": 8, "vec4<f32>": 16}[kind]
    return total


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("limits", (FLOOR, WIDE), ids=("floor", "wide"))
def test_memory_is_counted_as_the_text_declares_it(dims: tuple[int, int], limits: Limits):
    for few in (0, 1, 8):
        legal = list(configs.variants(dims, limits, few))
        assert legal[-1].template == ROW or any(v.template == ROW for v in legal), "row fits every device"
        for variant in legal:
            sizes = Sizes(1, 1, 1, 1, 1, 4 * dims[0], 4 * dims[1])
            text = kernel_of(sizes, _FLAGS, Plan(variant), "float32", True, 8).text()
            declared = workgroup_bytes_of(text)
            assert declared == configs.workgroup_bytes(variant, *dims) <= limits.workgroup_bytes, variant


def test_what_a_device_cannot_run_is_refused():
    tile = Variant(TILE, 8, 8, 4, 1)
    assert "16384" in configs.why_illegal(tile, 16, 16, FLOOR)
    assert not configs.why_illegal(tile, 16, 16, WIDE)
    assert "workgroup has at most 32" in configs.why_illegal(tile, 16, 16, WIDE._replace(invocations=32))
    lanes = tile._replace(subgroups=True)
    assert "none that may be used" in configs.why_illegal(lanes, 16, 16, WIDE._replace(subgroup=0))
    assert "a subgroup has 4" in configs.why_illegal(lanes, 16, 16, WIDE._replace(subgroup=4))
    with pytest.raises(SpecError, match="subgroups=True"):
        configs.resolve(Config(TILE, subgroups=True), (16, 16), FLOOR)
    assert configs.resolve(Config(AUTO), (128, 128), FLOOR).template == ROW
    with pytest.raises(SpecError, match="template"):
        Config("coop")


def test_gradients_fit_the_least_device():
    d4 = configs.MAX_GRADIENT_DIM // 4
    variants = configs.gradient_variants((d4, d4), FLOOR, Config())
    kernels = kernels_of(Sizes(1, 1, 1, 1, 1, 4 * d4, 4 * d4), _FLAGS, "float32", FLOOR, variants)
    assert max(workgroup_bytes_of(kernel.text()) for kernel in kernels) <= FLOOR.workgroup_bytes


def test_a_graphics_card_gets_rows_that_fit_its_registers():
    """As measured on an H100: channels of a lane times rows of a thread stay the same."""
    card = Limits(48 << 10, 1024, subgroup=32, kind="discrete")
    names = {d: configs.title(configs.resolve(Config(), (d // 4, d // 4), card)) for d in (64, 96, 128, 256)}
    assert names[64] == "row 4x4 128t 32k" and names[128] == "row 16x8 128t 16k"
    for d, name in names.items():
        assert configs.kept(configs.NAMED[name], d // 4, d // 4) <= configs.REGISTERS["discrete"], name
    without = card._replace(subgroup=0)
    assert configs.resolve(Config(), (16, 16), without).lanes == 1
    of_dq, of_dkv = configs.gradient_variants((16, 16), card, Config())
    assert configs.kept(of_dkv, 16, 16, "dkv") == 128 and of_dq.lanes == 8


def test_few_rows_share_a_workgroup():
    card = Limits(48 << 10, 1024, subgroup=32, kind="discrete")
    for rows, most in ((1, 1), (3, 4), (4, 4), (8, 8), (9, 16)):
        assert configs.variants((32, 32), card, rows)[0].rows == most
    assert configs.filling(128, 2048, "discrete") == 4  # 1 x 8 heads, 2,048 rows
    assert configs.filling(32, 512, "discrete") == 4
    assert configs.splits(32, 32768, 2048) == 64 and configs.splits(1, 1000, 2048) == 3
    assert configs.filling(2048, 8192, "discrete") == configs.filling(1, 2048, "cpu") == 1


def test_a_plan_needs_no_device_and_no_wgpu():
    q = torch.empty(1, 8, 128, 64, device="meta")
    plan = polyflash.explain(q, q, q, causal=True, target="webgpu")
    assert plan.backend == "webgpu" and "webgpu/forward" in str(plan)
    lists = polyflash.Mask.blocks(torch.eye(2) > 0, rows=64, keys=64)
    listed = polyflash.explain(q, q, q, mask=lists.to("meta"), target="webgpu")
    assert listed.backend == "torch" and "interval lists" in str(listed)
    step = polyflash.explain(q[:, :, :1], q, q, target="webgpu")
    assert step.chosen is not None and step.chosen.name == "webgpu/decode"


def test_cpu_tensors_go_there_by_name_alone():
    q = torch.randn(1, 1, 4, 8)
    plan = polyflash.explain(q, q, q)
    assert plan.backend != "webgpu"
    words = [v.reasons for v in plan.verdicts if v.row.backend == "webgpu"]
    assert all(any("copies CPU tensors" in reason for reason in reasons) for reasons in words)


def test_no_length_is_in_a_kernel():
    """So that a sentence compiles nothing as it grows."""
    kernels = {
        kernel_of(Sizes(b, 2, 1, m, n, 64, 64), _FLAGS, Plan(Variant(TILE, 4, 8, 4, 2)), "float32", True, 8)
        for b, m, n in ((1, 1, 1), (2, 100, 7), (3, 5, 100_000))
    }
    assert len(kernels) == 1


def test_the_target_is_the_least_there_is():
    assert target.parse("webgpu").shared_bytes == FLOOR.workgroup_bytes


def test_directives_of_kernel_files():
    lines = ["a", "//: for x < N", "b {x}", "//: end", "//: if ON", "c", "//: else", "d", "//: end"]
    assert render.expand(iter(lines), {"N": 2, "ON": 0}, 8) == ["a", "b 0u", "b 1u", "d"]
    loop = render.expand(iter(lines), {"N": 9, "ON": 1}, 8)
    assert loop == ["a", "for (var x = 0u; x < N; x++) {", "b x", "}", "c"]


def test_tune_keeps_a_variant_that_the_next_plan_takes(
    on: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Races without a clock: the first variant that runs here is quicker, the others are even. One that the
    device cannot run is said, and passed over."""
    looks = iter((0.5, 0.5))
    fits, beyond = configs.lanes(1, 1, 64, 4), configs.lanes(32, 8, 128, 4)
    monkeypatch.setattr(on, "limits", on.limits._replace(subgroup=min(on.limits.subgroup, 8)))

    def race(arms: Mapping[str, Callable[[], object]], length: float) -> dict[str, float]:
        for arm in arms.values():
            arm()
        return {name: 1.0 if name == search.INCUMBENT else next(looks, 1.0) for name in arms}

    monkeypatch.setattr(store, "folder", lambda: str(tmp_path / "tuned"))
    monkeypatch.setattr(command, "_race", lambda device, seconds: race)
    monkeypatch.setattr(configs, "RANKING", dict.fromkeys(configs.RANKING, (beyond, fits)))
    sizes = ("--seqlen", "70/90", "--heads", "2", "--head-dim", "16", "--dtype", "float32")
    assert main(["tune", "--backend", "webgpu", *sizes]) == 0
    told = capsys.readouterr().out
    assert f"{configs.title(beyond)}: fails" in told and f"{configs.title(fits)}: quicker ×2.00" in told
    q, k = torch.randn(1, 2, 70, 16), torch.randn(1, 2, 90, 16)
    plan = polyflash.explain(q, k, k, backend="webgpu")
    assert plan.rung == "tuned" and plan.config == Config(variant=configs.title(fits))
    out = polyflash.attention(q, k, k, backend="webgpu")
    torch.testing.assert_close(out.double(), attention_reference(q, k, k).out, rtol=1e-5, atol=1e-5)
    assert main(["tune", "--backend", "webgpu", "--forget"]) == 0
    assert polyflash.explain(q, k, k, backend="webgpu").rung == "heuristic"
