"""One rank of a stage: `python -m benchmarks.parallel.rank RANK RANKS RENDEZVOUS DEVICE BACKEND STAGE`. Rank
0 prints a JSON line for everything that is found, as soon as it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parallel import correct, times

TIMEOUT_S = 40  # of a collective

# Documents of mixed length, as a batch of pretraining has them: half its tokens in long ones.
MIXED = (0.25, 0.125, 0.125, *(1 / 32,) * 8, *(1 / 128,) * 32)
# And long documents, as they come.
LONG = (2, 8, 1, 4, 16, 3, 2, 1, 12, 4, 2, 6, 1, 2)


def lengths(rows: int) -> list[int]:
    return [int(rows * share) for share in MIXED]


PROBLEMS: dict[str, dict[str, Any]] = {
    "32k": {"rows": 1 << 15, "heads": (32, 8), "head_dim": 128, "times": 3},
    "128k": {"rows": 1 << 17, "heads": (32, 8), "head_dim": 128, "times": 1},
    "32k-mha": {"rows": 1 << 15, "heads": (16, 16), "head_dim": 128, "times": 3},
    "varlen-32k": {
        "rows": 1 << 15, "heads": (32, 8), "head_dim": 128, "times": 3, "members": lengths(1 << 15),
    },
    "varlen-128k": {
        "rows": 1 << 17, "heads": (32, 8), "head_dim": 128, "times": 2, "members": lengths(1 << 17),
    },
    "documents-128k": {
        "rows": 1 << 17, "heads": (32, 8), "head_dim": 128, "times": 2, "members": [n << 11 for n in LONG],
    },
    "tiny": {"rows": 256, "heads": (4, 2), "head_dim": 16, "times": 1},
    "varlen-tiny": {"rows": 256, "heads": (4, 2), "head_dim": 16, "times": 1, "members": lengths(256)},
}  # fmt: skip


def found(stage: str, device: torch.device) -> Iterator[dict[str, Any]]:
    kind, *words = stage.split(",")
    if kind == "correct":
        return correct.cases(words[0], words[1], words[2], device)
    if kind == "handshakes":
        return correct.handshakes(device)
    return times.rows(words[0], PROBLEMS[words[0]], device, int(words[1]), words[2:])


def main() -> None:
    rank, ranks, place, kind, backend, stage = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    how: Any = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=TIMEOUT_S)}
    dist.init_process_group(backend, init_method=f"file://{place}", **how)
    for part in stage.split("+"):
        for row in found(part, device):
            if rank == 0:
                print(json.dumps({"stage": part, "backend": backend, **row}), flush=True)
    if rank == 0:
        print(json.dumps({"stage": stage, "kind": "end"}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of a backend may hold the interpreter's end


if __name__ == "__main__":
    main()
