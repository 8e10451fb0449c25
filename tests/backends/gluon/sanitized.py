"""Kernels of the Gluon engine on small ragged shapes under compute-sanitizer, each tool and group in a
process that is killed once its time is over.

    python -m tests.backends.gluon.sanitized [--tools racecheck,synccheck,memcheck] [--seconds 60] [GROUPS]
        [--width 1] [--path .../compute-sanitizer] [--keep FOLDER] [--options "--racecheck-report all"]

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
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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


RUNNING: set[int] = set()  # process groups of tools


class Access(NamedTuple):
    """One side of a race: "Read" or "Write", the file, and where the line is: in "f", or at its head, "def
    f", which stands for code of the compiler's own."""

    kind: str
    file: str
    place: str


# What racecheck reports though it is no race, by both sides, and why.
ROLE = (
    "warp_specialize stores the roles of warps, all meet at hardware barrier 1, and each loads its own; "
    "reported by 2025.3, not by 2026.4: 2026.1 corrected false reports of warpgroups that meet on Hopper"
)
BOARD = (
    "the words of the board, which are ordered both ways in machine code: the lanes of the producer "
    "store, meet, and the first arrives at `full`, for which readers wait; a consumer reads, its threads "
    "meet by bar.sync, and the first arrives at `free`, for which the producer waits before it stores "
    "again. 2026.4 follows this in some forms, such as 128 and 256 causal, and not in others of the same "
    "code, such as 64 causal"
)
KNOWN = {
    frozenset((Access("Read", file, read), Access("Write", file, written))): reason
    for file, read, written, reason in (
        ("forward_sm90.py", "def attend_sm90", "def start_roles", ROLE),
        ("forward_sm90.py", "def attend_sm90", "attend_sm90", ROLE),
        ("backward_sm90.py", "def differentiate_sm90", "def differentiate_sm90", ROLE),
        ("channel.py", "word_of", "tell", BOARD),
    )
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
def place_of(file: str, line: int) -> str:
    """The innermost function of a file of the engine that a line is in, with "def" where it begins."""
    path = Path(gluon.__file__).parent / Path(file).name
    found = ""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ():
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            if first <= line <= (node.end_lineno or first):
                found = node.name if line > node.lineno else f"def {node.name}"
    return found


def races(said: str) -> Counter[frozenset[Access]]:
    """How often racecheck reports which two accesses."""
    found: Counter[frozenset[Access]] = Counter()
    for block in said.split("========= \n"):
        if not (reported := _RACE.search(block)):
            continue
        sides = [
            Access(kind, Path(file).name, place_of(file, int(line)))
            for kind, file, line in _SIDE.findall(block[reported.start() :])
        ]
        first, *others = sides or [Access("", "", block.strip()[:120])]
        found.update(frozenset((first, x)) for x in others or [first])
    return found


def unknown(said: str) -> list[str]:
    """What a tool reports beside what is known."""
    told = [
        f"{times} x " + " and ".join(f"{x.kind} of {x.file} {x.place}" for x in sorted(pair))
        for pair, times in races(said).items()
        if pair not in KNOWN
    ]
    lines = re.findall(
        r"========= ((?:Error|Warning|Invalid|Barrier|Program hit|Internal)[^\n]{0,150})", said
    )
    return told + [x for x in lines if not _RACE.match(x)]


def run(command: list[str], seconds: float) -> tuple[str, int | str]:
    """What a command says, and its status. Its process group is killed once its time is over."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(command, start_new_session=True, **pipes)
    RUNNING.add(child.pid)
    try:
        return child.communicate(timeout=seconds)[0], child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return child.communicate()[0], "cut off"
    finally:
        RUNNING.discard(child.pid)


def stop(*_: Any) -> None:
    """Ends what runs, and this."""
    for pid in RUNNING:
        os.killpg(pid, signal.SIGKILL)
    os._exit(1)


def told(which: str, name: str, asked: argparse.Namespace) -> bool:
    """Runs a group under a tool, and says what it found. Is it as it should be?"""
    start = time.monotonic()
    child = [sys.executable, "-m", __spec__.name, "--child", name]
    more = [*only_ours(asked.path), "--print-limit", "2000", *asked.options.split()]
    said, status = run([asked.path, "--tool", which, *more, *child], asked.seconds)
    if asked.keep:
        Path(asked.keep, f"{which}-{name}.txt").write_text(said, encoding="utf-8")
    last = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", said)
    new = unknown(said)
    known = sum(n for pair, n in races(said).items() if pair in KNOWN)
    fine = bool(last) and not new and status == 0 and "Traceback" not in said
    took = time.monotonic() - start
    lines = [
        f"{'ok' if fine else 'WRONG':6}{which} {name}: {status}, {last[-1:]}, {known} known, {took:.0f} s"
    ]
    lines += [f"    {line}" for line in new[:12]]
    if not last or "Traceback" in said:
        lines.append(said[-600:])
    print("\n".join(lines), flush=True)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"some of {', '.join(GROUPS[:4])} ...")
    parser.add_argument("--tools", default="racecheck,synccheck,memcheck")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--width", type=int, default=1, help="so many at once")
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
    signal.signal(signal.SIGTERM, stop)
    groups = asked.groups or GROUPS
    with ThreadPoolExecutor(asked.width) as pool:
        made = [(which, name, asked) for which in asked.tools.split(",") for name in groups]
        return int(not all(pool.map(lambda x: told(*x), made)))


if __name__ == "__main__":
    sys.exit(main())
