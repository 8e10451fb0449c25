"""The problems that `tune` and `ablate` are asked about on the command line, and where they are run."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

import torch

from polyflash import backends, plan, target
from polyflash.errors import SpecError, UnsupportedError, spec_error
from polyflash.options import device_here
from polyflash.spec import Phase
from polyflash.target import Target
from polyflash.tuning.trial import Trial, switches_of, trial
from polyflash.workloads import Workload, workloads


def problems(options: argparse.Namespace) -> tuple[Workload, ...]:
    """The one problem given by sizes, else those of the catalogue with the tag "tune"."""
    if options.seqlen:
        (rows, keys), (heads, kv_heads), (dim, dim_v) = options.seqlen, options.heads, options.head_dim
        if min(options.batch, rows, keys, heads, kv_heads, dim, dim_v) < 1 or heads % max(1, kv_heads):
            change = "Query heads are a multiple of the others."
            raise spec_error("sizes", "a 0 or odd heads", "positive sizes", change)
        name = f"{'causal' if options.causal else 'full'}-{options.dtype}-{rows}x{keys}-d{dim}"
        made = Workload(
            name, frozenset(), options.batch, heads, kv_heads, rows, keys, dim, dim_v, options.dtype,
            "top_left" if options.causal == "top_left" else bool(options.causal),
        )  # fmt: skip
        return (made,)
    words = " ".join(options.filter).lower().replace(",", " ").split()
    found = tuple(w for w in workloads("tune") if all(word in w.name.split("-") for word in words))
    if not found:
        raise SpecError(f"filter: got {' '.join(words)!r}, which no problem has. See --list")
    return found


def device_of(options: argparse.Namespace) -> str:
    """The torch device asked for, else a GPU if there is one and the backend may run there."""
    has_gpu = torch.cuda.is_available() and options.backend != "cpu"
    chosen = device_here(options.device or ("cuda" if has_gpu else "cpu"))
    here = target_of(chosen)
    rows = [row for row in backends.TABLE if options.backend in (None, row.backend)]
    if not any(here.name.startswith(row.targets) for row in rows):
        wanted = ", ".join(dict.fromkeys(t for row in rows for t in row.targets))
        raise UnsupportedError(f"{options.backend}: its kernels need {wanted} and this is {here.name}")
    return chosen


def target_of(device: str) -> Target:
    """The target of a torch device."""
    return target.detect(torch.device(device).type, torch.device(device).index or 0)


def switches(chosen: Sequence[Workload], options: argparse.Namespace, device: str) -> set[str]:
    """The switches of these problems' kernels: "base2", and "base2=off"."""
    here = target_of(device)
    found: set[str] = set()
    phases = [Phase(name) for name in options.phase]
    for phase in (*phases, *([Phase.DECODE] if Phase.FORWARD in phases else [])):
        for workload in chosen:
            spec = workload.spec(phase=phase, device=torch.device(device).type)
            with contextlib.suppress(UnsupportedError):
                launch = plan.select(spec, here, backends.TABLE, backend=options.backend or "", config="")
                found.update(switches_of(launch))
    return found | {name.partition("=")[0] for name in found}


def trials(chosen: Sequence[Workload], phase: str, backend: str | None, device: str) -> list[Trial]:
    """The problems on the rows that run them."""
    return [trial(w, Phase(phase), backend or "", device=device) for w in chosen]
