"""What the compiler makes of a kernel for a GPU that need not be here: registers, spills, instructions.

`compile_for` specialises as a launch does and needs neither device, driver nor C compiler; under
TRITON_INTERPRET nothing can be compiled. Seen with Triton 3.6 and 3.9.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from polyflash import env
from polyflash.backends.triton.tiles import shared_limit
from polyflash.errors import described, spec_error

if TYPE_CHECKING:
    from polyflash.target import Target

_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.M)
_AMD = re.compile(r"^\t([a-z]\w+)", re.M)  # labels and directives begin otherwise
_LIMITS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTER_FILE, _WARPS = 65536, {"sm80": 64, "sm86": 48, "sm89": 48, "sm90": 64, "sm100": 64, "sm120": 48}
_SHARED_OF_CORE = {"sm80": 164, "sm86": 100, "sm89": 100, "sm90": 228, "sm100": 228, "sm120": 100}  # KiB


@dataclass(frozen=True, slots=True)
class Report:
    """One kernel's machine code. Bytes and registers are per thread, `shared_bytes` per program."""

    registers: int  # on AMD vector registers, accumulators among them
    accumulators: int = 0  # of them: AGPRs
    spill_bytes: int = 0  # NVIDIA: written and read back, as ptxas counts; AMD: scratch memory
    spilled_registers: int = 0  # AMD: vector registers
    spilled_scalars: int = 0  # AMD: scalar ones, which go to lanes of vector registers
    stack_bytes: int = 0
    local_loads: int = 0  # LDL, STL: the stack's instructions
    local_stores: int = 0
    shared_bytes: int = 0
    instructions: int = 0
    matrix: Mapping[str, int] = field(default_factory=dict)  # matrix instructions by mnemonic
    warnings: tuple[str, ...] = ()  # of ptxas, C75xx: wgmma is serialised
    occupancy: int = 0  # NVIDIA: programs of a multiprocessor; AMD: waves of a SIMD

    @property
    def spills(self) -> bool:
        return bool(self.spill_bytes or self.spilled_registers or self.local_loads or self.local_stores)


class Compiled(NamedTuple):
    """What triton.compile returned, what ptxas said, and for whom."""

    kernel: Any
    log: str
    target: Target


def gpu_target(target: Target) -> GPUTarget:
    """Triton's word for a target such as "cuda:sm90" or "hip:gfx942"."""
    if target.kind == "hip":
        return GPUTarget("hip", target.arch, target.warp_size)
    if target.kind != "cuda":
        raise spec_error(
            "target", got=described(target.name), wanted="a GPU", change="Name one such as cuda:sm90."
        )
    return GPUTarget("cuda", int(target.arch.removeprefix("sm")), target.warp_size)


def compile_for(
    kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any], target: Target
) -> Compiled:
    """Compiles as `kernel[grid](**arguments, **options)` would on `target`.

    arguments: every parameter by name; for tensors MockTensor(dtype) stands for one at an address that 16
    divides and of less than 2 GiB. options: num_warps, num_stages. Errors of the compiler pass through.
    """
    if env.TRITON_INTERPRET.is_set():
        got = f"{env.TRITON_INTERPRET.name} is set"
        raise spec_error("compile_for", got=got, wanted="a compiler", change="Unset it before the start.")
    gpu = gpu_target(target)
    backend = make_backend(gpu)
    given = {**arguments, **options, "debug": False, "instrumentation_mode": ""}
    bound, specialisation, rest = create_function_from_signature(kernel.signature, kernel.params, backend)(
        **given
    )
    parsed, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialisation, rest)
    source_of = GluonASTSource if kernel.is_gluon() else ASTSource
    with _logged() as log:
        source = source_of(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=gpu, options=parsed.__dict__)
    return Compiled(compiled, log.getvalue(), target)


@contextlib.contextmanager
def _logged() -> Iterator[io.StringIO]:
    """Compiles anew, so that ptxas speaks, and leaves nothing in the user's cache."""
    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
        knobs.cache.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        yield log


def report(compiled: Compiled) -> Report:
    """The figures of a compiled kernel."""
    return _amd_report(compiled) if compiled.target.kind == "hip" else _nvidia_report(compiled)


def _nvidia_report(compiled: Compiled) -> Report:
    kernel, log, target = compiled
    sass = _sass(kernel.asm["cubin"])
    counts = Counter(_SASS.findall(sass))
    used, limits = re.search(r"Used (\d+) registers", log), _LIMITS.search(log)
    if used is None or limits is None or not counts:
        raise RuntimeError(f"ptxas or cuobjdump said nothing that is known here:\n{log}\n{sass[:400]}")
    registers, shared = int(used[1]), int(kernel.metadata.shared)
    return Report(
        registers=registers,
        spill_bytes=int(limits[2]) + int(limits[3]),
        stack_bytes=int(limits[1]),
        local_loads=counts["LDL"],
        local_stores=counts["STL"],
        shared_bytes=shared,
        instructions=counts.total(),
        matrix={name: n for name, n in sorted(counts.items()) if "MMA" in name},
        warnings=tuple(sorted(set(re.findall(r"C75\d\d", log)))),
        occupancy=_programs(registers, shared, kernel.metadata.num_warps, target.arch),
    )


def _sass(cubin: bytes) -> str:
    """The disassembly, by the tool in Triton's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _programs(registers: int, shared: int, warps: int, arch: str) -> int:
    """Programs that a multiprocessor holds at once: registers are given to warps by 256, and each program
    takes 1 KiB of shared memory more. 0 where the architecture is not known."""
    if arch not in _WARPS:
        return 0
    by_registers = _REGISTER_FILE // (-(-registers * 32 // 256) * 256 * warps)
    return min(by_registers, _SHARED_OF_CORE[arch] * 1024 // (shared + 1024), _WARPS[arch] // warps)


def _amd_report(compiled: Compiled) -> Report:
    kernel = compiled.kernel
    text = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s+(\d+)", text, re.M)
        return int(found[1]) if found else 0

    waves = re.search(r"Occupancy: (\d+)", text)
    counts = Counter(_AMD.findall(text))
    scratch, spilled = number("private_segment_fixed_size"), number("vgpr_spill_count")
    return Report(
        registers=number("vgpr_count"),
        accumulators=number("agpr_count"),
        spill_bytes=scratch if spilled else 0,
        spilled_registers=spilled,
        spilled_scalars=number("sgpr_spill_count"),
        stack_bytes=scratch,
        shared_bytes=int(kernel.metadata.shared),
        instructions=counts.total(),
        matrix={n: k for n, k in sorted(counts.items()) if n.startswith(("v_mfma", "v_wmma"))},
        occupancy=int(waves[1]) if waves else 0,
    )


def matrix_prefixes(target: Target) -> tuple[str, ...]:
    """How matrix instructions of a target are called."""
    if target.kind == "hip":
        return ("v_mfma",) if target.arch.startswith("gfx9") else ("v_wmma",)
    return {"sm90": ("HGMMA",), "sm100": ("UTCHMMA",)}.get(target.arch, ("HMMA",))


def faults(found: Report, target: Target) -> dict[str, str]:
    """What is not as it should be, by name: "spills", "stack", "matrix", "serial", "shared"."""
    fault = {}
    if found.spills:
        fault["spills"] = f"{found.spill_bytes} B, {found.spilled_registers} vector registers"
    elif found.stack_bytes:
        fault["stack"] = f"{found.stack_bytes} B of stack"
    if not any(name.startswith(matrix_prefixes(target)) for name in found.matrix):
        names = " or ".join(matrix_prefixes(target))
        fault["matrix"] = f"no {names}, but {', '.join(found.matrix) or 'no matrix instruction'}"
    if found.warnings:
        fault["serial"] = f"ptxas warns: {', '.join(found.warnings)}"
    if found.shared_bytes > shared_limit(target):
        fault["shared"] = f"{found.shared_bytes} B of shared memory, {shared_limit(target)} B there are"
    return fault
