"""What the compiler makes of the shipped Triton kernels, against the recorded file. Needs triton, but no GPU.

    python -m benchmarks.codegen [--every] [--only GLOB]                compares, and names what differs
    python -m benchmarks.codegen --record --reason "..." [--every] [--only GLOB]

The file is tests/backends/triton/codegen.json: per Triton version and kernel what is allowed. It changes with
a reason, which is kept in it. What is not as it should be (a spill, no matrix instruction) needs an exception
there, written by hand, that says why. Exit status 1: something differs, or has no exception.

`compile_for` specialises as a launch does and needs neither device, driver nor C compiler; under
TRITON_INTERPRET nothing can be compiled. Seen with Triton 3.6 and 3.9.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from benchmarks import ROOT
from benchmarks.codegen.cases import Case, default_cases, every_case, must_be_clean
from polyflash import env
from polyflash.backends.triton.tiles import shared_limit
from polyflash.errors import described, spec_error
from polyflash.target import Target

FILE = ROOT / "tests" / "backends" / "triton" / "codegen.json"
PINNED = "3.6.0"  # the Triton of the tests
EXACT = ("spill_bytes", "spilled_registers", "stack_bytes", "shared_bytes")
AT_MOST = ("registers", "spilled_scalars")
TILE = ("block_m", "block_n", "num_warps", "num_stages")
SLACK = 1.1  # instructions: code may grow by a tenth
WITHOUT_PRODUCTS = frozenset(("center", "finish_dq", "merge_splits", "round_rows", "turn_values"))
ONCE = WITHOUT_PRODUCTS | {"make_dkv-2"}  # at head dim 128 alone: it says enough of them
BY_DEFAULT_ONCE = ONCE | {"attend_sm90-2", "make_again"}  # and these by default, as they take long
_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.M)
_AMD = re.compile(r"^\t([a-z]\w+)", re.M)  # labels and directives begin otherwise
_LIMITS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class Report:
    """One kernel's machine code. Bytes and registers are per thread, `shared_bytes` per program."""

    registers: int  # on AMD vector registers, accumulators among them
    spill_bytes: int = 0  # NVIDIA: written and read back, as ptxas counts; AMD: scratch memory
    spilled_registers: int = 0  # AMD: vector registers
    spilled_scalars: int = 0  # AMD: scalar ones, which go to lanes of vector registers
    stack_bytes: int = 0
    local_accesses: int = 0  # LDL, STL: the stack's instructions
    shared_bytes: int = 0
    instructions: int = 0
    matrix: Mapping[str, int] = field(default_factory=dict)  # matrix instructions by mnemonic
    warnings: tuple[str, ...] = ()  # of ptxas, C75xx: wgmma is serialised

    @property
    def spills(self) -> bool:
        return bool(self.spill_bytes or self.spilled_registers or self.local_accesses)


class Compiled(NamedTuple):
    """What triton.compile returned, what ptxas said, and for whom."""

    kernel: Any
    log: str
    target: Target


def gpu_target(target: Target) -> GPUTarget:
    """Triton's word for a target such as "cuda:sm90" or "hip:gfx942"."""
    if target.kind not in ("cuda", "hip"):
        change = "Name one such as cuda:sm90."
        raise spec_error("target", got=described(target.name), wanted="a GPU", change=change)
    arch = target.arch if target.kind == "hip" else int(target.arch.removeprefix("sm"))
    return GPUTarget(target.kind, arch, target.warp_size)


def compile_for(
    kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any], target: Target
) -> Compiled:
    """Compiles as `kernel[grid](**arguments, **options)` would on `target`; anew, so that ptxas speaks, and
    without leaving anything in the user's cache.

    arguments: every parameter by name; for tensors MockTensor(dtype) stands for one at an address that 16
    divides and of less than 2 GiB. options: num_warps, num_stages. Errors of the compiler pass through.
    """
    if env.TRITON_INTERPRET.is_set():
        got = f"{env.TRITON_INTERPRET.name} is set"
        raise spec_error("compile_for", got=got, wanted="a compiler", change="Unset it before the start.")
    gpu = gpu_target(target)
    backend = make_backend(gpu)
    given = {**arguments, **options, "debug": False, "instrumentation_mode": ""}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialisation, rest = bind(**given)
    parsed, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialisation, rest)
    source_of, log = GluonASTSource if kernel.is_gluon() else ASTSource, io.StringIO()
    scopes = knobs.nvidia.scope(), knobs.compilation.scope(), knobs.cache.scope(), redirect_stdout(log)
    with tempfile.TemporaryDirectory() as folder, scopes[0], scopes[1], scopes[2], scopes[3]:
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile = folder, True, True
        source = source_of(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=gpu, options=parsed.__dict__)
    return Compiled(compiled, log.getvalue(), target)


def report(compiled: Compiled) -> Report:
    """The figures of a compiled kernel."""
    kernel, log, target = compiled
    shared = int(kernel.metadata.shared)
    if target.kind == "hip":
        text = kernel.asm["amdgcn"]
        numbers = {name: int(n) for name, n in re.findall(r"^\s*\.(\w+):\s+(\d+)", text, re.M)[::-1]}
        names = "vgpr_spill_count", "sgpr_spill_count", "vgpr_count", "private_segment_fixed_size"
        vectors, scalars, used, scratch = (numbers.get(name, 0) for name in names)
        counts, matrix = Counter(_AMD.findall(text)), r"v_(mfma|wmma)"
        spilled = {"spill_bytes": scratch if vectors else 0, "spilled_registers": vectors}
        rest: dict[str, Any] = {**spilled, "spilled_scalars": scalars, "stack_bytes": scratch}
    else:
        with tempfile.TemporaryDirectory() as folder:  # disassembled by the tool in Triton's wheel
            path = Path(folder, "kernel.cubin")
            path.write_bytes(kernel.asm["cubin"])
            command = [knobs.nvidia.nvdisasm.path, "-c", "-ndf", str(path)]  # without its data flow: quicker
            sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        counts, matrix = Counter(_SASS.findall(sass)), "MMA"
        said, limits = re.search(r"Used (\d+) registers", log), _LIMITS.search(log)
        if said is None or limits is None or not counts:
            raise RuntimeError(f"ptxas or nvdisasm said nothing that is known here:\n{log}\n{sass[:400]}")
        used, stack, *spilled_bytes = int(said[1]), *map(int, limits.groups())
        rest = {"spill_bytes": sum(spilled_bytes), "stack_bytes": stack}
        rest |= {"local_accesses": counts["LDL"] + counts["STL"]}
        rest |= {"warnings": tuple(sorted(set(re.findall(r"C75\d\d", log))))}
    found = {name: n for name, n in sorted(counts.items()) if re.search(matrix, name)}
    return Report(used, shared_bytes=shared, instructions=counts.total(), matrix=found, **rest)


def faults(found: Report, target: Target, *, entry: str = "") -> dict[str, str]:
    """What is not as it should be, by name: "spills", "stack", "matrix", "serial", "shared". Of entries of
    kernels without products no matrix instructions are wanted."""
    units: dict[str, tuple[str, ...]] = {"sm90": ("HGMMA", "QGMMA"), "sm100": ("UTCHMMA", "UTCQMMA")}
    fault: dict[str, str] = {}
    wanted = units.get(target.arch, ("HMMA", "QMMA"))
    if target.kind == "hip":
        wanted = ("v_mfma",) if target.arch.startswith("gfx9") else ("v_wmma",)
    if found.spills:
        fault["spills"] = f"{found.spill_bytes} B, {found.spilled_registers} vector registers"
    elif found.stack_bytes:
        fault["stack"] = f"{found.stack_bytes} B of stack"
    has_products = entry.rpartition("/")[2] not in WITHOUT_PRODUCTS
    if has_products and not any(name.startswith(wanted) for name in found.matrix):
        names = ", ".join(found.matrix) or "no matrix instruction"
        fault["matrix"] = f"no {wanted[0]}, but {names}"
    if found.warnings:
        fault["serial"] = f"ptxas warns: {', '.join(found.warnings)}"
    if found.shared_bytes > shared_limit(target):
        fault["shared"] = f"{found.shared_bytes} B of shared memory, {shared_limit(target)} B there are"
    return fault


def load() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def kernels(case: Case, once: frozenset[str] = ONCE) -> Iterator[tuple[str, Report]]:
    """Compiles what the case launches, those of `once` at head dim 128 alone; the id of its entry, and its
    report. A call's second launch of a kernel ends in -2."""
    times: Counter[str] = Counter()
    for kernel, arguments, options in case.launches():
        name = kernel.fn.__name__
        times[name] += 1
        name += f"-{times[name]}" if times[name] > 1 else ""
        if name not in once or case.head_dim == 128:
            yield f"{case.id}/{name}", report(compile_for(kernel, arguments, options, case.target))


def as_recorded(found: Report, case: Case, fault: Mapping[str, str]) -> dict[str, Any]:
    kept = {name: getattr(found, name) for name in (*EXACT, *AT_MOST, "instructions")}
    return {"tile": tile_of(case.config()), **kept, "matrix": sorted(found.matrix), "faults": sorted(fault)}


def tile_of(config: Any) -> list[Any]:
    """Rows, keys, warps and stages, and how blocks are loaded if not by pointers."""
    loads = getattr(config, "loads", "pointer")
    return [*(getattr(config, name) for name in TILE), *([] if loads == "pointer" else [loads])]


def exceptions(
    recorded: Mapping[str, Any], version: str, entry: str, fault: str, *, measured: bool = False
) -> list[Mapping[str, str]]:
    """Those that allow a fault with this Triton; one that names no version holds for all. measured: those
    that say what a clean kernel would cost."""
    named = [e for e in recorded["exceptions"] if e["fault"] == fault and fnmatchcase(entry, e["entries"])]
    here = [e for e in named if e.get("triton", version) == version]
    return [e for e in here if not measured or e.get("measured")]


def complaints(recorded: Mapping[str, Any], version: str, entry: str, found: Report, case: Case) -> list[str]:
    """How a kernel differs from what is recorded for this Triton; of one without a record, what has no
    exception."""
    fault, clean = faults(found, case.target, entry=entry), version == PINNED and must_be_clean(case)
    told = []
    for name, text in fault.items():
        measured = clean and name in ("spills", "serial")
        if name == "shared" or not exceptions(recorded, version, entry, name, measured=measured):
            told.append(f"{entry}: {text}")
    if (old := recorded["versions"].get(version, {}).get(entry)) is None:
        return told
    new = as_recorded(found, case, fault)
    worse = [name for name in ("tile", "matrix", *EXACT) if new[name] != old[name]]
    worse += [name for name in AT_MOST if new[name] > old[name]]
    worse += ["instructions"] if new["instructions"] > old["instructions"] * SLACK else []
    return told + [f"{entry}: {name} {new[name]}, recorded {old[name]}" for name in worse]


def record(
    recorded: dict[str, Any], version: str, compiled: Iterable[tuple[Case, str, Report]], reason: str
) -> None:
    """Puts reports into `recorded`; `unexplained` then says what needs an exception that is not there."""
    before = recorded["versions"].get(version, {})
    entries = dict(before)
    for case, entry, found in compiled:
        entries[entry] = as_recorded(found, case, faults(found, case.target, entry=entry))
    known = {case.id for case in every_case()}
    entries = {e: entries[e] for e in sorted(entries) if e.rpartition("/")[0] in known}
    if entries != before:
        recorded["versions"][version] = entries
        note = {"triton": version, "reason": reason}
        if recorded["reasons"][-1:] != [note]:
            recorded["reasons"].append(note)


def write(recorded: Mapping[str, Any]) -> None:
    """One line per entry, so that a difference names what changed."""
    parts, blocks = [], []
    for name in ("reasons", "exceptions"):
        lines = ",\n".join("  " + json.dumps(x) for x in recorded[name])
        parts.append(f' "{name}": [\n{lines}\n ],\n')
    for version, entries in sorted(recorded["versions"].items()):
        lines = ",\n".join(f"   {json.dumps(e)}: {json.dumps(x)}" for e, x in sorted(entries.items()))
        blocks.append(f"  {json.dumps(version)}: {{\n{lines}\n  }}")
    text = "{\n" + "".join(parts) + ' "versions": {\n' + ",\n".join(blocks) + "\n }\n}\n"
    FILE.write_text(text, encoding="utf-8")


def unexplained(recorded: Mapping[str, Any]) -> list[str]:
    """Entries with a fault that no exception allows."""
    return [
        f"{version}: {entry}: {fault} without an exception"
        for version, entries in recorded["versions"].items()
        for entry, values in entries.items()
        for fault in values["faults"]
        if not exceptions(recorded, version, entry, fault)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--every", action="store_true", help="all kernels, not those of `make test` alone")
    add("--only", metavar="GLOB", default="*", help="cases whose id matches, such as 'backward/sm90/*'")
    add("--record", action="store_true", help="write what is found into the file")
    add("--reason", default="", help="why the file changes")
    asked = parser.parse_args()
    if asked.record and not asked.reason.strip():
        parser.error("--record needs --reason: the file changes for a reason, which it keeps")
    recorded, version, told = load(), triton.__version__, []
    cases, once = (every_case(), ONCE) if asked.every else (default_cases(), BY_DEFAULT_ONCE)
    for case in cases:
        compiled = []
        for entry, found in kernels(case, once) if fnmatchcase(case.id, asked.only) else ():
            compiled.append((case, entry, found))
            wrong = complaints(recorded, version, entry, found, case)
            told += wrong
            spill = f"{found.spill_bytes} B spilled" if found.spills else "no spill"
            matrix = ", ".join(f"{n} {name}" for name, n in found.matrix.items())
            line = f"{found.registers:4} registers, {spill}, {found.shared_bytes} B shared, {matrix}"
            print(f"{'differs' if wrong else 'ok':8}{entry:56}{line}", flush=True)
        if asked.record and compiled:  # what is killed half way has kept most
            record(recorded, version, compiled, asked.reason)
            write(recorded)
    told = unexplained(recorded) if asked.record else told
    print("\n".join(told))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
