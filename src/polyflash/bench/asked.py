"""The problems that `tune` and `ablate` are asked about on the command line, and where they are run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from polyflash import backends, target
from polyflash.dtypes import BY_NAME
from polyflash.errors import SpecError, UnsupportedError, spec_error
from polyflash.spec import Phase
from polyflash.target import Target
from polyflash.tuning.trial import Trial, trial
from polyflash.workloads import Workload, workloads

PHASES = ("forward", "backward", "statistics")


def add(parser: Any) -> None:
    """Adds the options that name problems."""
    parser.add_argument("--backend", choices=backends.BACKENDS, help="the kernels of this backend")
    parser.add_argument("--device", default="", metavar="NAME", help="cuda if there is one, else cpu")
    parser.add_argument(
        "--phase",
        type=_phases,
        default=["forward"],
        metavar="A,B",
        help=f"{', '.join(PHASES)}; forward is decode too, where rows are few",
    )
    parser.add_argument(
        "--filter", nargs="+", default=[], metavar="WORD", help="tuning problems whose name has every word"
    )
    parser.add_argument("--seqlen", type=_pair, metavar="Q/K", help="one problem of these lengths instead")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=_pair, default=(8, 8), metavar="Q/KV")
    parser.add_argument("--head-dim", type=_pair, default=(64, 64), metavar="QK/V")
    parser.add_argument("--dtype", choices=tuple(BY_NAME), default="bfloat16")
    parser.add_argument("--causal", choices=("bottom_right", "top_left"), metavar="top_left")
    parser.add_argument("--list", action="store_true", help="print the names of the problems and stop")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a race, about")


def _phases(text: str) -> list[str]:
    wanted = [name for name in text.split(",") if name]
    unknown = [name for name in wanted if name not in PHASES]
    if unknown or not wanted:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted some of {', '.join(PHASES)}")
    return wanted


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    if not first.isdecimal() or not (second or "0").isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number, or two as in 8/2")
    return int(first), int(second or first)


def problems(options: argparse.Namespace) -> tuple[Workload, ...]:
    """The one problem given by sizes, else those of the catalogue with the tag "tune"."""
    if options.seqlen:
        (rows, keys), (heads, kv_heads), (dim, dim_v) = options.seqlen, options.heads, options.head_dim
        if min(options.batch, rows, keys, heads, kv_heads, dim, dim_v) < 1 or heads % max(1, kv_heads):
            change = "Query heads are a multiple of the others."
            raise spec_error("sizes", got="a 0 or odd heads", wanted="positive sizes", change=change)
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
    """The torch device asked for, else the one there is."""
    has_gpu = torch.cuda.is_available()
    chosen = options.device or ("cuda" if has_gpu and options.backend != "cpu" else "cpu")
    if chosen.partition(":")[0] == "cuda" and not has_gpu:
        raise UnsupportedError("device: torch finds no GPU here. Use --device cpu, or a machine that has one")
    if chosen.partition(":")[0] not in ("cuda", "cpu"):
        raise spec_error(
            "device", got=repr(chosen), wanted="cuda, cuda:1, ... or cpu", change="Leave it out."
        )
    here = target_of(chosen)
    rows = [row for row in backends.TABLE if options.backend in (None, row.backend)]
    if not any(here.name.startswith(row.targets) for row in rows):
        wanted = ", ".join(dict.fromkeys(t for row in rows for t in row.targets))
        raise UnsupportedError(f"{options.backend}: its kernels need {wanted} and this is {here.name}")
    return chosen


def target_of(device: str) -> Target:
    """The target of a torch device."""
    return target.detect(torch.device(device).type, torch.device(device).index or 0)


def trials(chosen: Sequence[Workload], phase: str, backend: str | None, device: str) -> list[Trial]:
    """The problems on the rows that run them."""
    return [trial(w, Phase(phase), backend or "", device=device) for w in chosen]
