"""Kernels of the Gluon engine on small ragged shapes under compute-sanitizer, each tool and group in a
process that is killed once its time is over.

    python -m tests.backends.gluon.sanitized [--tools racecheck,synccheck,memcheck] [--seconds 60] [GROUPS]
        [--path .../compute-sanitizer] [--keep FOLDER] [--options "--racecheck-report all"]

A group is a head dim and full, causal, packed or packed-causal, with -gradients behind it the backward pass.
In each some shapes have more tiles than cores, so that slots and boards are used again. The engine's own
kernels are watched alone. Exit status 1: a tool reports what `KNOWN` does not have, or a result is wrong; 2:
there is no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyflash.backends import gluon
from tests.backends.gluon import guarded
from tests.backends.gluon.guarded import ERROR, Case, tensors

MEMBERS = ((100, 130), (1, 20), (0, 5), (64, 64), (200, 0), (129, 300))
MANY = 40 * ((20, 70), (70, 20))  # members more, of a tile each
KERNELS = "attend_sm90", "differentiate_sm90"
KINDS = "packed-causal", "packed", "causal", "full"
GROUPS = [f"{dims}-{kind}" for dims in (192, 128, 64, 256) for kind in KINDS]
GROUPS += [f"{dims}-{kind}-gradients" for dims in (64, 128) for kind in KINDS]


class Access(NamedTuple):
    """One side of a race: "Read" or "Write", the file, and the function that the line is in."""

    kind: str
    file: str
    function: str


# What racecheck reports though it is no race, by both sides, and why.
KNOWN = {
    frozenset(
        (Access("Read", "forward_sm90.py", "attend_sm90"), Access("Write", "forward_sm90.py", "start_roles"))
    ): ("the compiler's code of warp_specialize: a warp's role is stored, then all warps meet at barrier 1"),
}
_RACE = re.compile(r"(?:Error|Warning): Race reported between (.*)")
_SIDE = re.compile(r"(Read|Write) access at \w+\+0x[0-9a-f]+ in (\S+):(\d+)")


def call(name: str) -> None:
    """The group's calls, held to float64."""
    dims, causal = int(name.split("-")[0]), "causal" in name
    if "packed" in name:
        call_packed(dims, causal, "gradients" in name)
        return
    for rows, keys, batch in ((333, 300, 1), (65, 129, 1), (20, 70, 100)):
        case = Case(dims, causal, rows, keys, batch)
        operands = tensors(case)
        if "gradients" in name:
            above = guarded.cotangents(case)
            found = guarded.our_gradients(case, operands, *above)
            guarded.hold_gradients(case, found, guarded.right_gradients(case, operands, *above))
            continue
        hold(case, guarded.call(case, *operands)[0], operands)
        operands[2][:, :, keys // 2, 3] = torch.nan  # so that a tile is mended
        guarded.call(case, *operands)
    torch.cuda.synchronize()


def call_packed(dims: int, causal: bool, backward: bool) -> None:
    guarded.MEMBERS = MEMBERS + MANY
    q, k, v, cu_q, cu_k = guarded.packed_tensors(dims)
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    more: dict[str, Any] = {"causal": causal, "return_lse": True, "backend": "gluon"}
    got = guarded.polyflash.attention_varlen(*leaves, cu_q.int(), cu_k.int(), **more)
    dout = torch.randn(q.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    found = torch.autograd.grad(got.out, leaves, dout) if backward else ()
    for i, (rows, keys) in enumerate(guarded.MEMBERS[: len(MEMBERS) + 2]):
        at_q, at_k = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        if not (rows and keys):
            continue
        case = Case(dims, causal, rows, keys)
        at = at_q, at_k, at_k
        alone = [x[place].detach().transpose(0, 1)[None] for x, place in zip(leaves, at, strict=True)]
        hold(case, got.out[at_q].transpose(0, 1)[None], alone)
        if backward:
            above = dout[at_q].transpose(0, 1)[None], torch.zeros(1, q.shape[1], rows, device="cuda")
            mine = [x[place].transpose(0, 1)[None] for x, place in zip(found, at, strict=True)]
            guarded.hold_gradients(case, mine, guarded.right_gradients(case, alone, *above))


def hold(case: Case, out: torch.Tensor, operands: list[torch.Tensor]) -> None:
    wanted, _ = guarded.right(case, *operands)
    error = float((out.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
    assert error < ERROR[case.dtype], f"{case}: error {error}"


def tool() -> str | None:
    """compute-sanitizer, of the path, of a toolkit or of a wheel."""
    found = shutil.which("compute-sanitizer")
    folders = [Path("/usr/local"), Path(sysconfig.get_paths()["purelib"], "nvidia")]
    names = (p for f in folders if f.is_dir() for p in f.glob("**/compute-sanitizer") if p.is_file())
    return found or next(map(str, names), None)


def only_ours(path: str) -> list[str]:
    """Its option that watches the engine's kernels alone, which had several names."""
    known = subprocess.run([path, "--help"], capture_output=True, text=True, check=False).stdout
    option = next((x for x in ("--kernel-name", "--kernel-regex", "--filter") if x + " " in known), None)
    return [word for name in KERNELS for word in (option, f"kns={name}")] if option else []


@cache
def function_at(file: str, line: int) -> str:
    """The innermost function of a file of the engine that a line is in, decorators included."""
    path = Path(gluon.__file__).parent / Path(file).name
    found = ""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ():
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            found = node.name if first <= line <= (node.end_lineno or first) else found
    return found


def races(said: str) -> Counter[frozenset[Access]]:
    """How often racecheck reports which two accesses."""
    found: Counter[frozenset[Access]] = Counter()
    for block in said.split("========= \n"):
        if not (reported := _RACE.search(block)):
            continue
        sides = [
            Access(kind, Path(file).name, function_at(file, int(line)))
            for kind, file, line in _SIDE.findall(block[reported.start() :])
        ]
        first, *others = sides or [Access("", "", block.strip()[:120])]
        found.update(frozenset((first, x)) for x in others or [first])
    return found


def unknown(said: str) -> list[str]:
    """What a tool reports beside what is known."""
    told = [
        f"{times} x " + " and ".join(f"{x.kind} of {x.file} {x.function}" for x in sorted(pair))
        for pair, times in races(said).items()
        if pair not in KNOWN
    ]
    lines = re.findall(
        r"========= ((?:Error|Warning|Invalid|Barrier|Program hit|Internal)[^\n]{0,150})", said
    )
    return told + [x for x in lines if not _RACE.match(x)]


def told(which: str, name: str, asked: argparse.Namespace, path: str) -> bool:
    """Runs a group under a tool, and says what it found. Is it as it should be?"""
    status: int | str
    child = [sys.executable, "-m", __spec__.name, "--child", name]
    more = [*only_ours(path), "--print-limit", "2000", *asked.options.split()]
    try:
        run = subprocess.run(
            [path, "--tool", which, *more, *child],
            capture_output=True,
            text=True,
            timeout=asked.seconds,
            check=False,
        )
        said, status = run.stdout + run.stderr, run.returncode
    except subprocess.TimeoutExpired as late:
        said, status = (
            late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or "",
            "cut off",
        )
    if asked.keep:
        Path(asked.keep, f"{which}-{name}.txt").write_text(said, encoding="utf-8")
    last = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", said)
    new = unknown(said)
    known = {KNOWN[pair]: times for pair, times in races(said).items() if pair in KNOWN}
    fine = bool(last) and not new and status == 0 and "Traceback" not in said
    print(f"{'ok' if fine else 'WRONG':6} {which} {name}: {status}, {last[-1:]}, known {known}", flush=True)
    print("".join(f"    {line}\n" for line in new[:12]), end="", flush=True)
    if not last or "Traceback" in said:
        print(said[-600:], flush=True)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"some of {', '.join(GROUPS[:4])} ...")
    parser.add_argument("--tools", default="racecheck,synccheck,memcheck")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--path", default=tool(), help="the compute-sanitizer")
    parser.add_argument("--keep", help="a folder for all that the tools say")
    parser.add_argument("--options", default="", help="more options of the tool")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        call(asked.child)
        sys.stdout.flush()
        os._exit(0)
    if asked.path is None:
        print("no compute-sanitizer here")
        return 2
    groups = asked.groups or GROUPS
    fine = [told(which, name, asked, asked.path) for which in asked.tools.split(",") for name in groups]
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main())
