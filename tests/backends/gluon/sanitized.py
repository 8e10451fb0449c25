"""Kernels of the Gluon engine on small ragged shapes under compute-sanitizer, each tool and group in a
process that is killed once its time is over.

    python -m tests.backends.gluon.sanitized [--tools racecheck,synccheck,memcheck] [--seconds 60] [GROUPS]

A group is a head dim and full, causal, packed or packed-causal. Only the engine's own kernels are watched.
What racecheck is known to say of each: one place, the role of a warp, which the compiler's code for
`warp_specialize` stores (docs/results/2026-11-25-h100-gluon.md). Exit status 1: a tool reports anything, or a
result is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import torch

from tests.backends.gluon import guarded
from tests.backends.gluon.guarded import ERROR, Case, tensors

MEMBERS = ((100, 130), (1, 20), (0, 5), (64, 64), (200, 0), (129, 300))
GROUPS = [
    f"{dims}-{kind}" for dims in (192, 128, 64, 256) for kind in ("packed-causal", "packed", "causal", "full")
]
_PLACE = re.compile(r"(?:at|in)\s+(?:block.*)?([\w.:<>]+\+0x[0-9a-f]+)")


def call(name: str) -> None:
    """The group's calls, held to float64."""
    dims, causal = int(name.split("-")[0]), name.endswith("causal")
    if "packed" in name:
        guarded.MEMBERS = MEMBERS
        q, k, v, cu_q, cu_k = guarded.packed_tensors(dims)
        more = {"causal": causal, "return_lse": True, "backend": "gluon"}
        got = guarded.polyflash.attention_varlen(q, k, v, cu_q.int(), cu_k.int(), **more)
        for i, (rows, keys) in enumerate(MEMBERS):
            at_q, at_k = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
            if rows and keys:
                alone = [x.transpose(0, 1)[None] for x in (q[at_q], k[at_k], v[at_k])]
                hold(Case(dims, causal, rows, keys), got.out[at_q].transpose(0, 1)[None], alone)
        return
    for rows, keys in ((333, 300), (65, 129)):
        case = Case(dims, causal, rows, keys)
        operands = tensors(case)
        hold(case, guarded.call(case, *operands)[0], operands)
        operands[2][:, :, keys // 2, 3] = torch.nan  # so that a tile is mended
        guarded.call(case, *operands)
    torch.cuda.synchronize()


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
    names = (name for name in ("--kernel-name", "--kernel-regex", "--filter") if name + " " in known)
    return next(([name, "kns=attend_sm90"] for name in names), [])


def told(which: str, name: str, seconds: float, path: str) -> bool:
    """Runs a group under a tool, and says what it found. Is it as it should be?"""
    child = [sys.executable, "-m", __spec__.name, "--child", name]
    command = [path, "--tool", which, *only_ours(path), "--print-limit", "2000", *child]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        print(f"{which} {name}: cut off after {seconds:g} s; {said[-300:]}", flush=True)
        return False
    said = run.stdout + run.stderr
    last = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", said)
    kinds = Counter(re.findall(r"========= (Error|Warning): ([^\n]{0,60})", said))
    places = Counter(_PLACE.findall(said))
    print(
        f"{which} {name}: rc {run.returncode} {last[-1:]} {dict(kinds)} {dict(places.most_common(6))}",
        flush=True,
    )
    if not last or "Traceback" in said:
        print(said[-600:], flush=True)
    return bool(last) and " 0 errors" in last[-1] and not run.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"some of {', '.join(GROUPS[:4])} ...")
    parser.add_argument("--tools", default="racecheck,synccheck,memcheck")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        call(asked.child)
        sys.stdout.flush()
        os._exit(0)
    path = tool()
    if path is None:
        print("no compute-sanitizer here")
        return 0
    groups = asked.groups or GROUPS
    fine = [told(which, name, asked.seconds, path) for which in asked.tools.split(",") for name in groups]
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main())
