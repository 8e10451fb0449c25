"""The problems that `bench` and `tune` time, by tag; those of the tests are in tests/catalogue.py."""

from __future__ import annotations

from polyflash.workloads.problem import Workload

_BENCH = frozenset({"bench", "tune"})


def _bench() -> tuple[Workload, ...]:
    rows = []
    for dtype in ("float32", "bfloat16", "float16"):
        for head_dim in (64, 128):
            for seqlen in (512, 2048, 8192):
                for causal in (False, True):
                    kind = "causal" if causal else "full"
                    name = f"{kind}-{dtype}-{seqlen}-d{head_dim}"
                    rows.append(
                        Workload(name, _BENCH, 1, 8, 8, seqlen, seqlen, head_dim, dtype=dtype, causal=causal)
                    )
        rows.append(
            Workload(f"gqa-{dtype}-2048-d64", _BENCH, 1, 8, 2, 2048, 2048, 64, dtype=dtype, causal=True)
        )
        name = f"window-{dtype}-8192-d64"
        window = (255, None)
        rows.append(Workload(name, _BENCH, 1, 8, 8, 8192, 8192, 64, dtype=dtype, causal=True, window=window))
    return tuple(rows)


CATALOGUE = _bench()


def workloads(tag: str) -> tuple[Workload, ...]:
    """Every workload that carries `tag`, in catalogue order."""
    return tuple(w for w in CATALOGUE if tag in w.tags)
