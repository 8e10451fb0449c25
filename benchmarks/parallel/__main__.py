"""Context parallelism on the GPUs of one host, or tiny over gloo on this CPU:

    python -m benchmarks.parallel --json build/parallel.jsonl          # 2 GPUs, about 8 minutes
    python -m benchmarks.parallel --device cpu                         # tries the suite itself
    python -m benchmarks.parallel --only times --together --methods ring --problems 32k,3 128k,1

First every method, order and mask in two dtypes beside one GPU and the float64 oracle, all stages side by
side; then times, each stage for itself, of GPUs that have been busy with the same for a while. A stage is one
process per rank, all killed when its time is over; what was found by then stands in the file of JSON lines.
Returns 1 if a result was wrong or a stage did not end. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel.correct import MASKS
from benchmarks.parallel.times import METHODS

_BOTH, _ALONE = "cpu:gloo,cuda:nccl", "nccl"
_KEPT_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_TIMES = ("32k,3", "128k,3", "varlen-32k,3", "documents-128k,3", "32k-mha,3", "varlen-128k,3")


class Stage:
    """The processes of one stage, begun at once."""

    def __init__(self, name: str, ranks: int, device: str, backend: str, limit: float) -> None:
        self.name, self.until, self.begun = name, time.monotonic() + limit, time.monotonic()
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        place = Path(self.folder.name)
        words = [str(ranks), str(place / "rendezvous"), device, backend, name]
        self.files = [(place / f"{rank}.out").open("w+") for rank in range(ranks)]
        command = [sys.executable, "-m", "benchmarks.parallel.rank"]
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank), *words], stdout=out, stderr=subprocess.STDOUT, env=_environment()
            )
            for rank, out in enumerate(self.files)
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Waits for the end, or makes it; what rank 0 found, and how the stage ended."""
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.1, self.until - time.monotonic()))
        late = [i for i, rank in enumerate(self.ranks) if rank.poll() is None]
        for rank in self.ranks:
            rank.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # of a driver that holds it
                rank.wait(5)
        said = []
        for out in self.files:
            out.seek(0)
            said.append(out.read())
            out.close()
        self.folder.cleanup()
        found = []
        for line in said[0].splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        took = time.monotonic() - self.begun
        if not any(row.get("kind") == "end" for row in found):
            tails = [text[-1500:] for text in said]
            found.append({"stage": self.name, "kind": "lost", "killed": late, "said": tails})
        found[-1] |= {"seconds": round(took, 1), "codes": [rank.returncode for rank in self.ranks]}
        return found


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")))
    return os.environ | _KEPT_OFF | {"PYTHONPATH": path}


def checks(cpu: bool) -> list[tuple[str, str]]:
    """(stage, backend) of what is to be right."""
    dtypes = ("float32", "bfloat16")
    every = [(f"correct,{mask},{dtype},small", _BOTH) for mask in MASKS for dtype in dtypes]
    every += [("handshakes", _BOTH), ("handshakes", _ALONE), ("correct,causal,float32,small", _ALONE)]
    if cpu:
        return [(name, "gloo") for name, backend in every if backend == _BOTH]
    return [*every, *((f"correct,{mask},bfloat16,large", _BOTH) for mask in ("causal", "packed"))]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The times as lines."""
    lines = [
        "                         one GPU ms  ranks ms  share  of slower  no handshake  computes ms  "
        "sends ms  hidden  peak MB  formula MB"
    ]
    lines += [
        f"{x['name']:24} {x['one_s'] * 1e3:11.2f} {x['ranks_s'] * 1e3:9.2f} {x['share']:6.1%} "
        f"{x['share_of_slower']:10.1%} {x['quiet_share']:13.1%} {x['computes_s'] * 1e3:12.2f} "
        f"{x['sends_s'] * 1e3:9.2f} {x['hidden']:7.0%} {x['peak'] / 1e6:8.0f} {x['formula'] / 1e6:11.0f}"
        for x in rows
        if x.get("kind") == "time"
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, default=Path("build/parallel.jsonl"), metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=float, default=500.0, metavar="SECONDS", help="of wall time; 500")
    parser.add_argument("--only", choices=("checks", "times"), help="one half alone")
    parser.add_argument(
        "--problems", nargs="+", default=_TIMES, metavar="NAME,ROUNDS", help="of the times; all"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="of the times; all")
    parser.add_argument("--together", action="store_true", help="one stage for all times, which starts once")
    options = parser.parse_args(argv)
    until, cpu = time.monotonic() + options.budget, options.device == "cpu"
    options.json.parent.mkdir(parents=True, exist_ok=True)
    devices = [] if cpu else [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not cpu and len(devices) < options.ranks:
        print(f"{len(devices)} CUDA devices, {options.ranks} are needed", file=sys.stderr)
        return 1
    every: list[dict[str, Any]] = [{"kind": "run", "devices": devices, "torch": torch.__version__}]

    def kept(found: list[dict[str, Any]]) -> None:
        every.extend(found)
        options.json.write_text("".join(json.dumps(row) + "\n" for row in every), encoding="utf-8")
        for row in found:
            if row.get("wrong") or row["kind"] in ("lost", "end"):
                print({x: row[x] for x in row if x not in ("all",)}, flush=True)

    if options.only != "times":
        limit = min(150.0, options.budget / 2)
        waiting, width = checks(cpu), 2 if cpu else 16
        while waiting:
            begun = [
                Stage(name, options.ranks, options.device, backend, limit)
                for name, backend in waiting[:width]
            ]
            waiting = waiting[width:]
            for stage in begun:
                kept(stage.rows())
    if options.only != "checks":
        backend = "gloo" if cpu else _BOTH
        problems = ("tiny,2", "varlen-tiny,2") if cpu else options.problems
        wanted = [",".join(("times", words, *options.methods)) for words in problems]
        for name in ["+".join(wanted)] if options.together else wanted:
            left = until - time.monotonic()
            if left > 20:
                limit = left if options.together else min(130.0, left)
                kept(Stage(name, options.ranks, options.device, backend, limit).rows())
                print(table(every), flush=True)
    right = [row for row in every if row["kind"] == "case"]
    wrong = [row for row in every if row.get("wrong") or row["kind"] == "lost"]
    print(f"{len(right)} cases, {len(wrong)} wrong or lost; {options.json}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
