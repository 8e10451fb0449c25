"""The code generation gate: what the compiler makes of shipped kernels is what is recorded in codegen.json.

Nothing here needs a GPU. `python -m benchmarks.codegen --record --reason "..."` changes the record.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyflash import SpecError, env
from polyflash.spec import Phase
from polyflash.target import parse

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.jit import MockTensor  # noqa: E402

from benchmarks.codegen import __main__ as script  # noqa: E402
from benchmarks.codegen.cases import (  # noqa: E402
    CLEAN,
    CODES,
    GLUON,
    GPUS,
    SHIPPED,
    Case,
    default_cases,
    every_case,
    must_be_clean,
)
from polyflash.backends.gluon import channel  # noqa: E402
from polyflash.backends.gluon import configs as gluon_configs  # noqa: E402
from polyflash.backends.gpu.views import Rows, View  # noqa: E402
from polyflash.backends.triton import merge, runtime  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
NEWEST = "POLYFLASH_NEWEST_TRITON"  # a folder that holds a triton newer than the installed one
compiles = pytest.mark.skipif(
    env.TRITON_INTERPRET.is_set(), reason=f"{env.TRITON_INTERPRET.name} is set: nothing can be compiled"
)


RECORDED, COMPILE = script.load(), script.compile_for
CLEAN_REPORT = script.Report(registers=100, shared_bytes=1024, instructions=1000, matrix={"HGMMA": 8})
HOPPER = Case(Phase.FORWARD, "cuda:sm90", "bfloat16", 128, "causal")


def _complaints(cases: tuple[Case, ...]) -> list[str]:
    return [
        text
        for case in cases
        for entry, found in script.kernels(case)
        for text in script.complaints(RECORDED, triton.__version__, entry, found, case)
    ]


def sampled(cases: Iterable[Case]) -> list[Any]:
    """The largest kernels first, so that none is left at the end for one process alone."""
    ordered = sorted(cases, key=lambda c: (c.phase is not Phase.BACKWARD, -c.head_dim))
    return [c if c in default_cases() else pytest.param(c, marks=pytest.mark.slow) for c in ordered]


@compiles
@pytest.mark.parametrize(
    "case",
    sampled(c for c in GLUON if c.problem in ("full", "causal", "window") or c in default_cases()),
    ids=lambda case: case.id,
)
def test_kernels_of_the_gluon_engine(case: Case, monkeypatch: pytest.MonkeyPatch):
    """As recorded; each consumer has the products of a first block, a loop for every kind of blocks and a
    last one, and once more to mend tiles. Named barriers of the compiler are none that the kernel takes."""
    texts: list[str] = []

    def compile_for(*call: Any) -> script.Compiled:
        made = COMPILE(*call)
        texts.append(made.kernel.asm["ptx"])
        return made

    monkeypatch.setattr(script, "compile_for", compile_for)
    kernels = tuple(script.kernels(case, script.BY_DEFAULT_ONCE))
    for kernel in kernels:
        assert not script.complaints(RECORDED, triton.__version__, *kernel, case)
    config, head_dim = case.config(), case.head_dim
    text, found = next(
        (text, found) for text, (entry, found) in zip(texts, kernels, strict=True) if entry.endswith("_sm90")
    )
    taken = {int(n) for n in re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\s+(\d+)", text)}
    assert taken and max(taken) < channel.RESERVED.value + getattr(config, "consumers", 2)
    if case.phase is Phase.BACKWARD:  # a block has dq, of all keys, and four of 64 keys and rows
        loops = {"full": 1, "window": 3}.get(case.problem, 2)
        block = 8 + 2 * (4 + head_dim // 16)
        products = 2 * (block * (loops + 1) + 8 * config.ahead)
    else:
        mends = 2 * (not config.apart)
        passes = mends + {"full": 2, "ragged": 2, "window": 4}.get(case.problem, 3)
        parts = len(gluon_configs.parts_of(head_dim))
        products = passes * config.consumers * (head_dim + config.block_n * parts) // 16
    assert found.matrix == {"HGMMA": products}


@compiles
@pytest.mark.parametrize(
    "case", sampled(c for c in default_cases() if c.backend == "triton"), ids=lambda case: case.id
)
def test_kernels_of_the_default_run(case: Case):
    assert not _complaints((case,))


@compiles
@pytest.mark.parametrize("case", sampled(CODES), ids=lambda case: case.id)
def test_products_of_codes(case: Case):
    """As recorded; the products of both, at twice the depth of those of 16 bits, and in 32 keys each."""
    kernels = dict(script.kernels(case))
    for entry, found in kernels.items():
        assert not script.complaints(RECORDED, triton.__version__, entry, found, case)
    config, passes = case.config(), 2 + (case.problem != "codes")
    products = passes * config.consumers * (case.head_dim + config.block_n) // 32
    assert kernels[f"{case.id}/attend_fp8"].matrix == {"QGMMA": products}


@compiles
@pytest.mark.parametrize("phase", [p.value for p in SHIPPED])
def test_calls_with_many_operands_compile(phase: str):
    """Triton may lose constants that stand in tuples in tuples; the interpreter cannot. Its launcher takes
    fields and parameters by names, so none is of both. That follows no size, so blocks are small."""
    case = Case(Phase(phase), "cuda:sm90", "bfloat16", 64, "everything")
    small = {name: 32 for name in ("block_n", "dq_block_n") if hasattr(case.config(), name)}
    launches = case.launches(replace(case.config(), **small))
    for kernel, arguments, options in launches:
        names = [*arguments["t"]._fields, *arguments["n"]._fields, *arguments]
        assert len(set(names)) == len(names), kernel
        script.compile_for(kernel, arguments, options, case.target)
    assert launches


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("phase", [p.value for p in SHIPPED])
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel(gpu: str, phase: str):
    cases = tuple(c for c in every_case() if c.target_name == gpu and c.phase.value == phase)
    assert not _complaints(cases)


def test_entries_have_cases_and_faults_have_reasons():
    known = {case.id for case in every_case()}
    for version, entries in RECORDED["versions"].items():
        for entry in entries:
            assert entry.rpartition("/")[0] in known, f"{version}: {entry} is of no case"
    assert not script.unexplained(RECORDED)
    for exception in RECORDED["exceptions"]:
        assert len(exception["because"]) > 20, exception
    assert RECORDED["reasons"] and all(r["reason"].strip() for r in RECORDED["reasons"])


def test_every_exception_is_needed():
    for exception in RECORDED["exceptions"]:
        assert any(
            exception in script.exceptions(RECORDED, version, entry, fault)
            for version, entries in RECORDED["versions"].items()
            for entry, values in entries.items()
            for fault in values["faults"]
        ), f"of no entry: {exception}"


def test_tiles_are_those_that_were_recorded():
    """Costs no compile: a changed table shows here even where only `make test-all` compiles."""
    cases = {case.id: case for case in every_case()}
    for entries in RECORDED["versions"].values():
        for entry, values in entries.items():
            assert script.tile_of(cases[entry.rpartition("/")[0]].config()) == values["tile"], entry


def test_default_cases_are_recorded_for_the_pinned_triton():
    entries = RECORDED["versions"][script.PINNED]
    have = {entry.rpartition("/")[0] for entry in entries}
    assert {case.id for case in default_cases()} <= have
    assert {case.target_name for case in default_cases()} == set(GPUS)


def test_what_must_be_clean_spills_only_where_that_is_measured_to_be_faster():
    cases = [case for case in every_case() if must_be_clean(case)]
    assert {(c.phase, c.target.arch) for c in cases} == {(p, a) for p, archs in CLEAN for a in archs}
    ids, version = {case.id for case in cases}, script.PINNED
    for entry, values in RECORDED["versions"][version].items():
        if entry.rpartition("/")[0] in ids:
            assert "serial" not in values["faults"], entry
            assert values["spill_bytes"] == 0 or "spills" in values["faults"], entry
            if "spills" in values["faults"]:
                assert script.exceptions(RECORDED, version, entry, "spills", measured=True), entry


SPOILED = {
    "spill_bytes": {"spill_bytes": 8, "local_accesses": 1},
    "spilled_registers": {"spilled_registers": 1},
    "stack_bytes": {"stack_bytes": 8},
    "registers": {"registers": 101},
    "matrix": {"matrix": {"HMMA": 8}},
    "none": {"matrix": {}},
    "serial": {"warnings": ("C7511",)},
    "shared": {"shared_bytes": 228 * 1024},
    "instructions": {"instructions": 1101},
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_worse_kernel_is_noticed(how: str):
    entry = f"{HOPPER.id}/attend"
    ledger: dict[str, Any] = {"reasons": [], "exceptions": [], "versions": {}}
    script.record(ledger, "0", [(HOPPER, entry, CLEAN_REPORT)], "first")
    assert not script.unexplained(ledger)
    assert not script.complaints(ledger, "0", entry, CLEAN_REPORT, HOPPER)
    worse = replace(CLEAN_REPORT, **SPOILED[how])
    assert script.complaints(ledger, "0", entry, worse, HOPPER)


def test_what_must_be_clean_needs_an_exception_that_says_what_was_measured():
    exception = {"entries": "*", "fault": "spills", "because": "-"}
    ledger: dict[str, Any] = {"reasons": [], "exceptions": [exception], "versions": {}}
    spilling = replace(CLEAN_REPORT, spill_bytes=8)
    assert script.complaints(ledger, script.PINNED, f"{HOPPER.id}/attend", spilling, HOPPER)
    assert not script.complaints(ledger, "9.9.9", f"{HOPPER.id}/attend", spilling, HOPPER)
    other = replace(HOPPER, target_name="cuda:sm120")
    found = replace(spilling, matrix={"HMMA": 8})
    assert not script.complaints(ledger, script.PINNED, f"{other.id}/attend", found, other)
    exception["measured"] = "H200: a tenth slower without"
    assert not script.complaints(ledger, script.PINNED, f"{HOPPER.id}/attend", spilling, HOPPER)


@compiles
def test_states_of_two_dtypes_are_merged_by_a_kernel_that_compiles():
    """The interpreter takes a name that stands for two shapes, and the compiler does not."""
    kinds, rows = (torch.float32, torch.bfloat16), Rows(MockTensor(torch.float32), 1 << 14, 1 << 12, 1)
    out, other = (View(MockTensor(kind), 1 << 20, 1 << 14, 128, 1) for kind in kinds)
    tuples = {"t": merge.Pair(out, rows, other, rows), "n": merge.Sizes(32, 4096, 128)}
    c = runtime.compiled_in(merge.Tile(D=128, WIDE=128))
    here = parse("hip:gfx942")  # in half the time that others take
    made = script.compile_for(merge.merge_pair, {**tuples, "c": c}, {"num_warps": 4}, here)
    assert "spills" not in script.faults(script.report(made), here)
    for three in (None, other):
        tuples["t"] = merge.Parts(other, out, other, three)  # type: ignore[assignment]
        made = script.compile_for(merge.add_parts, {**tuples, "c": c}, {"num_warps": 4}, here)
        assert "spills" not in script.faults(script.report(made), here)


@compiles
@pytest.mark.parametrize(
    ("phase", "problem", "dim"), [("decode", "token", 72), ("decode", "int4-blocks", 96)]
)
def test_rows_that_are_8_elements_apart_are_copied_16_bytes_at_a_time(phase: str, problem: str, dim: int):
    case = Case(Phase(phase), "cuda:sm90", "bfloat16", dim, problem)
    kernel, arguments, options = case.launches()[0]
    ptx = script.compile_for(kernel, arguments, options, case.target).kernel.asm["ptx"]
    assert re.search(r"cp.async.cg.shared.global [^;]*, 0x10", ptx)


@compiles
def test_a_tile_too_large_for_its_registers_spills():
    """A compiled one: 64 rows of float32 in four warps."""
    case = Case(Phase.FORWARD, "hip:gfx1100", "float32", 64, "full")
    config = replace(case.config(), block_m=64, block_n=16, num_warps=4)
    ((kernel, arguments, options),) = case.launches(config)
    found = script.report(script.compile_for(kernel, arguments, options, case.target))
    assert "spills" in script.faults(found, parse(case.target_name))


@compiles
@pytest.mark.slow
def test_the_newest_triton():
    """The same gate with the triton in the folder that the variable names."""
    folder = os.environ.get(NEWEST, "")
    if not folder:
        pytest.skip(f"{NEWEST} names no folder with a newer triton")
    paths = [folder, str(ROOT / "src"), str(ROOT)]
    child = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "benchmarks.codegen"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=child)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SpecError, match="a GPU"):
        script.gpu_target(parse("cpu:avx512"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SpecError, match="a compiler"):
        script.compile_for(None, {}, {}, parse("cuda:sm90"))
