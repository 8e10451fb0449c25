"""Laws of WGSL text that compilers do not enforce, or not all of them."""

from __future__ import annotations

import re

import pytest

from polyflash.backends.webgpu import render
from polyflash.backends.webgpu.backward import kernels_of
from polyflash.backends.webgpu.calls import Sizes
from polyflash.backends.webgpu.codes import constants_of
from polyflash.backends.webgpu.configs import FLOOR, ROW, TILE, Variant
from polyflash.backends.webgpu.device import Device
from polyflash.backends.webgpu.forward import Plan, kernel_of

SIZES = Sizes(1, 4, 2, 7, 9, 64, 48)
EVERYTHING = dict.fromkeys(
    ("MASK", "BIAS", "SEGMENTS", "SOFTCAP", "ALIBI", "SINKS", "ELEMENTS", "CHANGED", "DROPOUT"), 1
)
NOTHING = dict.fromkeys(EVERYTHING, 0)
MULTIPLIED = "int8/1x0+0x1*int8,int8/1x0*int8"
VARIANTS = {
    "tile": Plan(Variant(TILE, 8, 8, 4, 1)),
    "tile of subgroups": Plan(Variant(TILE, 8, 8, 4, 1, subgroups=True)),
    "packed splits": Plan(Variant(TILE, 8, 4, 1, 1), True, 4),
    "row": Plan(Variant(ROW, 64, rn4=4)),
    "rows of 4 lanes": Plan(Variant(ROW, 64, rm=4, rn4=4, subgroups=True, lanes=4)),
}
GRADIENTS = {
    "row": Variant(ROW, 64, rn4=4),
    "rows of 4 lanes": Variant(ROW, 64, rm=2, rn4=2, subgroups=True, lanes=4),
}
KERNELS = {
    **{
        f"{name}, {'every feature' if flags['MASK'] else 'plain'}, {kind}": kernel_of(
            SIZES, flags, plan, kind, True, 32
        )
        for name, plan in VARIANTS.items()
        for flags in (EVERYTHING, NOTHING)
        for kind in ("float32", "bfloat16", "float16 of the device")
    },
    **{
        f"{name}, products": kernel_of(
            SIZES, NOTHING | constants_of(SIZES, MULTIPLIED), VARIANTS[name], "float32", True, 32
        )
        for name in ("row", "rows of 4 lanes")
    },
    "pages": kernel_of(SIZES, NOTHING | {"PAGE": 16}, VARIANTS["packed splits"], "float32", True, 32),
    **{
        f"{kernel.name}, {name}": kernel
        for name, variant in GRADIENTS.items()
        for kernel in kernels_of(SIZES, EVERYTHING, "float16", FLOOR, (variant, variant))
    },
}


@pytest.mark.parametrize("name", KERNELS)
def test_barriers_stand_in_uniform_flow(name: str):
    """naga accepts a barrier that some threads never reach. Here one stands in the body of an entry point or
    in a loop whose bounds the whole workgroup shares, never in an `if`, a `switch` or after a `return`."""
    text = KERNELS[name].text()
    stack: list[str] = []
    for line in text.splitlines():
        code = line.partition("//")[0]
        if "workgroupBarrier" in code:
            assert not [opened for opened in stack if re.search(r"\bif\b|\belse\b|\bswitch\b", opened)], stack
            loops = [opened for opened in stack if "for (" in opened]
            for loop in loops:
                bounds = re.findall(r"[a-z]\w*\.[xy]|n\.group", loop.partition(";")[2].partition(";")[0])
                assert bounds, f"unknown bounds: {loop}"
        for mark in re.findall(r"[{}]", code):
            stack.append(code) if mark == "{" else stack.pop()
    assert not stack


@pytest.mark.parametrize("name", KERNELS)
def test_text_keeps_to_the_floor(name: str):
    """8 storage buffers, no infinity and no NaN as a literal, and nothing left of a directive."""
    text = KERNELS[name].text()
    assert text.count("var<storage") <= 8
    assert not re.search(r"//:|\{\w\}|\binf\b|\bnan\b|1\.0 / 0", text)
    assert "atomic<" not in text


def test_dialects():
    """Dawn demands the line that naga refuses."""
    kernel = KERNELS["tile of subgroups, plain, float32"]
    assert "enable subgroups;" not in kernel.text()
    assert kernel.text(render.DAWN).startswith("enable subgroups;\n")
    shared = KERNELS["tile, plain, float32"]
    assert "subgroup" not in shared.text() and shared.text(render.DAWN) == shared.text()
    assert KERNELS["row, plain, float16 of the device"].text().startswith("enable f16;\n")


def test_the_compiler_here_accepts_every_kernel(on: Device):
    """naga, or with `--adapter chromium` Dawn's tint, which looks for barriers that some threads miss."""
    for kernel in KERNELS.values():
        if on.limits.float16 or "enable f16;" not in kernel.text():
            on.wgpu.create_shader_module(code=kernel.text(on.dialect), label=kernel.name)
    if on.dialect == render.DAWN:
        text = KERNELS["row, plain, float32"].text(render.DAWN)
        divergent = text.replace("    workgroupBarrier();", "    if (t < 3u) { workgroupBarrier(); }", 1)
        assert divergent != text
        with pytest.raises(RuntimeError, match="uniform control flow"):
            on.wgpu.create_shader_module(code=divergent)


def test_every_kernel_file_is_used():
    used = {file for kernel in KERNELS.values() for file in kernel.files} | {"merge.wgsl"}
    assert used == {path.name for path in render.FOLDER.glob("*.wgsl")}
