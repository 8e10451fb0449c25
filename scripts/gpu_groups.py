"""Query groups on one GPU: a launch for each, all as rows of one call, and as requests of one batch.

    python scripts/gpu_groups.py [--seconds 1.0] [--json build/groups.json]

Zigzag chunks of context parallelism (early and late rows of rank r of W over all keys), then groups of few
rows behind one prefix. Every arm's results are compared with those of a call per group, and these with the
float64 reference in some rows; then all arms of a shape take turns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polyflash
from polyflash import Mask, torch_ops
from polyflash.bench.timing import compared
from polyflash.compare import TOLERANCE, worst_row
from polyflash.group_calls import one_walk
from polyflash.groups import _checked
from polyflash.reference import attention_reference

HEADS, KV_HEADS, DIM, ROWS = 32, 8, 128, 2048
Arms = dict[str, Callable[[], list[Tensor]]]


def drawn(rows: list[int], keys: int) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(keys + len(rows))
    made = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    groups = [made(1, HEADS, n, DIM) for n in rows]
    return groups, made(1, KV_HEADS, keys, DIM), made(1, KV_HEADS, keys, DIM)


def arms_of(groups: list[Tensor], k: Tensor, v: Tensor, offsets: list[int], ends: list[int]) -> Arms:
    places: dict[str, Any] = {"q_offsets": offsets, "kv_lens": ends}
    call = partial(polyflash.attention_groups, groups, k, v, **places)
    made: Arms = {
        "a call per group": partial(call, fused=False),
        "a call per group, triton": partial(call, fused=False, backend="triton"),
    }
    plain = _checked(groups, k, v, offsets, ends, "bhsd", dict.fromkeys(("window", "mask", "bias")), {
        "causal": True, "alibi_slopes": None, "softcap": 0.0, "sinks": None, "scale": None,
        "return_lse": False, "backend": None, "config": None,
    })  # fmt: skip
    _, one_k, one_v, _, args, _ = one_walk(plain.calls)
    sizes = [x.shape[2] for x in groups]
    made["rows behind each other, as decode"] = lambda: [
        *torch_ops.call(torch.cat([x for x in groups], 2), one_k, one_v, args)[0].split(sizes, 2)
    ]
    if len(set(sizes)) == 1:
        made |= as_requests(groups, k, v, offsets, ends)
    return made


def as_requests(groups: list[Tensor], k: Tensor, v: Tensor, offsets: list[int], ends: list[int]) -> Arms:
    """Groups as entries of a batch whose keys are the same memory, the longest first."""
    order = sorted(range(len(groups)), key=lambda i: -ends[i])
    lens, places = (torch.tensor([x[i] for i in order], dtype=torch.int32).cuda() for x in (ends, offsets))
    count, end = len(groups), max(ends)
    expanded = [x[:, :, :end].expand(count, -1, -1, -1) for x in (k, v)]

    def call(k: Tensor, v: Tensor, backend: str) -> list[Tensor]:
        q = torch.cat([groups[i] for i in order])
        out = polyflash.attention(
            q, k, v, causal=True, q_offset=places, mask=Mask.lengths(lens), backend=backend
        )
        parts = dict(zip(order, out.split(1), strict=True))
        return [parts[i] for i in range(count)]

    made: Arms = {"requests, triton": partial(call, *expanded, "triton")}
    if groups[0].shape[2] >= 64:
        made["requests, gluon"] = partial(call, *expanded, "gluon")
        copies = [x.contiguous() for x in expanded]
        made["requests, gluon, keys of their own"] = partial(call, *copies, "gluon")
    return made


def errors(results: list[Tensor], others: list[Tensor]) -> float:
    return max(worst_row(a, b, floor=1 / 16) for a, b in zip(results, others, strict=True))


def sampled(
    groups: list[Tensor], k: Tensor, v: Tensor, offsets: list[int], ends: list[int], got: list[Tensor]
) -> float:
    """The error of a call per group in three rows of two heads, in float64."""
    worst = 0.0
    for q, offset, end, out in zip(groups, offsets, ends, got, strict=True):
        for row in {0, q.shape[2] // 2, q.shape[2] - 1}:
            for head in (0, HEADS - 1):
                own = head // (HEADS // KV_HEADS)
                parts = (x[:, own : own + 1, :end].cpu() for x in (k, v))
                one = q[:, head : head + 1, row : row + 1].cpu()
                want, _ = attention_reference(one, *parts, causal=True, q_offset=offset + row)
                worst = max(
                    worst, worst_row(out[:, head : head + 1, row : row + 1].cpu(), want, floor=1 / 16)
                )
    return worst


def measured(
    name: str, rows: list[int], offsets: list[int], ends: list[int], seconds: float
) -> dict[str, Any]:
    groups, k, v = drawn(rows, max(ends))
    arms, row = arms_of(groups, k, v, offsets, ends), {"shape": name, "arms": {}}
    want = arms["a call per group"]()
    seen = sum(sum(min(o + i + 1, e) for i in range(n)) for n, o, e in zip(rows, offsets, ends, strict=True))
    print(f"\n{name}: {sampled(groups, k, v, offsets, ends, want):.1e} from the reference", flush=True)
    good: Arms = {}
    for arm, call in arms.items():
        try:
            error = errors(call(), want)
            row["arms"][arm] = {"error": error}
            if error > 2 * TOLERANCE["bfloat16"]:
                row["arms"][arm]["mark"] = "differs"
            else:
                good[arm] = call
        except Exception as raised:
            row["arms"][arm] = {"mark": f"{type(raised).__name__}: {str(raised).strip()[:120]}"}
    for arm, found in compared(good, "cuda:0", seconds * len(good)).summaries().items():
        row["arms"][arm] |= {
            "ms": found.median * 1e3,
            "iqr": found.spread,
            "tflops": 4 * HEADS * DIM * seen / found.median / 1e12,
        }
    base = row["arms"]["a call per group"]["ms"]
    for arm, found in row["arms"].items():
        if "ms" not in found:
            print(f"  {arm:36} {found.get('mark')} {found.get('error', '')}")
            continue
        time, rate = f"{found['ms']:8.4f} ms ±{found['iqr']:.0%} ×{found['ms'] / base:.3f}", found["tflops"]
        print(f"  {arm:36} {time} {rate:5.0f} TFLOP/s, off by {found['error']:.1e}")
    return row


def shapes() -> list[tuple[str, list[int], list[int], list[int]]]:
    made = []
    for ranks in (8, 32):
        for rank in (0, ranks // 2, ranks - 1):
            starts = [rank * ROWS, (2 * ranks - 1 - rank) * ROWS]
            name = f"rank {rank} of {ranks}, {2 * ranks * ROWS // 1024}k keys"
            made.append((name, [ROWS] * 2, starts, [n + ROWS for n in starts]))
    for count, rows in ((2, 256), (4, 64), (8, 16), (8, 4), (4, 1)):
        keys = 32768
        starts = [keys - rows - 16 * g for g in range(count)]
        made.append(
            (f"{count} groups of {rows} rows, 32k keys", [rows] * count, starts, [n + rows for n in starts])
        )
    return made


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--seconds", type=float, default=0.3, help="per arm and shape")
    made.add_argument("--json", type=Path)
    options = made.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    rows = [measured(*shape, options.seconds) for shape in shapes()]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
