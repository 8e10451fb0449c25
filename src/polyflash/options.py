"""Arguments of the command line: every command's options, their types, and what is wrong with a value.

Standard library only, so that `--help` takes no time and reports are made where torch is broken. A command's
code is named by its place and imported when it runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyflash import doctor, reports, warmup
from polyflash.dtypes import BY_NAME

ALIGNMENTS = ("bottom_right", "top_left")
FEATURES = (
    "alibi", "batch_invariant", "bias", "dropout", "intervals", "kv_lens", "kv_starts", "lse", "mask",
    "q_offset", "segments", "sinks", "softcap", "varlen",
)  # fmt: skip
PHASES = ("forward", "backward", "statistics")
FILES = (".safetensors", ".npz", ".npy")
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


class UsageError(Exception):
    """Arguments that make no sense together, or not on this machine; exit code 2."""


def parser(version: str) -> argparse.ArgumentParser:
    """The parser of all commands. `command` of what it returns is a function, or "module:name" of one."""
    made = argparse.ArgumentParser(prog="polyflash", description="Exact attention on every device.")
    made.add_argument("--version", action="version", version=f"polyflash {version}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND")
    _add_run(commands)
    _add_explain(commands)
    _add_bench(commands)
    _add_tune(commands)
    _add_ablate(commands)
    _add_warmup(commands)
    doctor.add(commands)
    reports.add(commands)
    return made


def with_alignment(argv: Sequence[str]) -> list[str]:
    """`--causal` alone is `--causal=bottom_right`; without this, argparse would take a following file name
    for its value. A following word that is neither stays, to be refused."""
    after = [*argv, ""][1:]
    return [
        "--causal=bottom_right" if word == "--causal" and _is_no_value(argv, follower) else word
        for word, follower in zip(argv, after, strict=True)
    ]


def _is_no_value(argv: Sequence[str], follower: str) -> bool:
    if follower in ALIGNMENTS:
        return False
    file = argv[0] == "run" and (Path(follower).suffix != "" or Path(follower).exists())
    return file or not follower or follower.startswith("-")


def device_here(name: str | None) -> str:
    """The torch device of `--device`, with its index, made the current one; UsageError where it is not."""
    if not name or name == "cpu":
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UsageError(
            f"--device: got {name}, and torch {torch.__version__} finds no GPU here. Leave it out"
        )
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    if index >= count:
        raise UsageError(f"--device: got {name}, wanted cuda:0 to cuda:{count - 1}")
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _device(text: str) -> str:
    kind, colon, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not index.isdecimal())):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted cpu, cuda or cuda:N")
    return text


def _backend(text: str) -> str:
    from polyflash.backends import BACKENDS

    if text not in BACKENDS:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted one of {', '.join(BACKENDS)}")
    return text


def _dtype(text: str) -> str:
    name = _SHORT.get(text.lower(), text.lower())
    if name not in BY_NAME:
        wanted = ", ".join((*BY_NAME, *_SHORT))
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted one of {wanted}")
    return name


def _size(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number")
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    """'8/2' -> (8, 2); '8' -> (8, 8)."""
    first, _, second = text.partition("/")
    if not first.isdecimal() or not (second or "0").isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number, or two as in 8/2")
    return int(first), int(second or first)


def _window(text: str) -> tuple[int | None, int | None]:
    sides = text.split(",")
    try:
        left, right = (None if side.strip().lower() in ("", "none") else int(side) for side in sides)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted LEFT,RIGHT such as 255,0 or 255,none"
        ) from None
    return left, right


def seconds(text: str) -> float:
    """A positive number."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a positive number")
    return found


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _features(text: str) -> list[str]:
    return _some_of(text, FEATURES)


def _phases(text: str) -> list[str]:
    wanted = _some_of(text, PHASES)
    if not wanted:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted some of {', '.join(PHASES)}")
    return wanted


def _some_of(text: str, known: Sequence[str]) -> list[str]:
    wanted = _names(text)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}, wanted some of {', '.join(known)}")
    return wanted


def _command(commands: Any, name: str, place: str, about: str, description: str) -> Any:
    made = commands.add_parser(name, help=about, description=description)
    made.set_defaults(command=place)
    made.add_argument("--quiet", action="store_true", help="results only: no progress, no commentary")
    return made


def _add_problem(add: Any, *, device: str, dtype: str | None) -> None:
    add.add_argument(
        "--causal", choices=ALIGNMENTS, metavar="top_left", help="causal; alone, it is bottom_right"
    )
    add.add_argument(
        "--dtype", type=_dtype, default=dtype, metavar="NAME", help=f"{', '.join(BY_NAME)}; bf16, fp16, fp32"
    )
    add.add_argument("--backend", type=_backend, metavar="NAME", help="the kernels of cpu, triton or torch")
    _add_device(add, device)


def _add_device(add: Any, told: str) -> None:
    add.add_argument("--device", type=_device, metavar="NAME", help=told)


def _add_run(commands: Any) -> None:
    about = "attention on Q, K, V from files"
    told = "Attention on Q, K, V from files: output and lse, with plan, time and error."
    add = _command(commands, "run", "polyflash.commands:run", about, told)
    _add_problem(add, device="cpu unless given; cuda, cuda:1", dtype=None)
    _add_window(add)
    add.add_argument(
        "files", nargs="+", metavar="FILE", help="one .safetensors or .npz, or three .npy: q, k, v"
    )
    for role in ("q", "k", "v"):
        add.add_argument(f"--{role}", metavar="NAME", help=f"tensor to take for {role}")
    add.add_argument(
        "--layout", choices=("bhsd", "bshd"), default="bhsd", help="axis order; the batch may be missing"
    )
    add.add_argument("--scale", type=float, help="multiplies q·k; 1/sqrt(head_dim) unless given")
    add.add_argument("-o", "--output", metavar="OUT", help="write output and lse here")


def _add_explain(commands: Any) -> None:
    about = "which kernel would run, and why no other"
    told = "Who would run a problem that exists only as sizes, on a device that need not be here."
    add = _command(commands, "explain", "polyflash.commands:explain", about, told)
    _add_problem(add, device="a device of this machine: cpu unless given; cuda, cuda:1", dtype="float32")
    _add_window(add)
    _add_sizes(add, seqlen=(2048, 2048))
    add.add_argument("--features", type=_features, default=[], metavar="A,B", help=", ".join(FEATURES))
    add.add_argument("--grad", action="store_true", help="plan the gradients too")
    add.add_argument(
        "--target", metavar="NAME", help="a device that need not be here: cuda:sm90, cpu:avx512+amx_bf16"
    )


def _add_window(add: Any) -> None:
    add.add_argument(
        "--window",
        type=_window,
        metavar="L,R",
        help="neighbours each side, self not counted; none is unbounded",
    )
    add.add_argument("--json", action="store_true", help="print JSON instead")


def _add_sizes(add: Any, *, seqlen: tuple[int, int] | None) -> None:
    add.add_argument("--batch", type=_size, default=1)
    add.add_argument(
        "--heads",
        type=_pair,
        default=(8, 8),
        metavar="Q/KV",
        help="8/2: 8 query heads over 2 key/value heads",
    )
    told = None if seqlen else "one problem of these lengths instead"
    add.add_argument("--seqlen", type=_pair, default=seqlen, metavar="Q/K", help=told)
    add.add_argument("--head-dim", type=_pair, default=(64, 64), metavar="QK/V")


def _add_bench(commands: Any) -> None:
    about = "this machine against torch SDPA and others"
    told = "This machine against torch SDPA and the other attention implementations found on it."
    add = _command(commands, "bench", "polyflash.bench.command:run", about, told)
    add.set_defaults(size="")
    add.add_argument("--device", type=_device, metavar="NAME", help="cpu unless given; cuda, cuda:1")
    add.add_argument(
        "--suite",
        type=_names,
        default=[],
        metavar="NAME,NAME",
        help="dense, windows, small and some of backward unless given; masks, bias, varlen, backward,"
        " decode, peers; all",
    )
    add.add_argument(
        "--peers", type=_names, default=[], metavar="NAME,NAME", help="the suite peers, with these alone"
    )
    add.add_argument("--rows", default="", metavar="NAME,NAME", help="these rows alone")
    add.add_argument(
        "--filter",
        nargs="+",
        default=[],
        metavar="WORD",
        help="rows whose name has every word: causal bfloat16 d64",
    )
    add.add_argument(
        "--list",
        action="store_true",
        help="print the names of the rows and stop; with --from, of marked ones",
    )
    size = add.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="short rows, short times"
    )
    size.add_argument(
        "--long", dest="size", action="store_const", const="long", help="8192 keys too, backward 4096"
    )
    add.add_argument("--calls", action="store_true", help="where the time of one tiny call goes")
    add.add_argument("--seconds", type=seconds, help="per row; 2, or 0.5 with --quick")
    add.add_argument("--json", metavar="FILE", help="write every round to FILE; Ctrl-C leaves what ran")
    add.add_argument("--page", metavar="FILE", help="write the tables to FILE as a Markdown page")
    add.add_argument("--plot", metavar="FILE", help="draw the steps of the suite decode")
    add.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        default=[],
        metavar="FILE",
        help="measure nothing: take the rows of these JSON files, a later file's first",
    )


def _add_tuning(add: Any) -> None:
    """Adds what `tune` and `ablate` share: which problems, of which kernels, and for how long."""
    _add_problem(add, device="cuda if there is one, else cpu; cuda:1", dtype="bfloat16")
    told = f"{', '.join(PHASES)}; forward is decode too, where rows are few"
    add.add_argument("--phase", type=_phases, default=["forward"], metavar="A,B", help=told)
    add.add_argument(
        "--filter", nargs="+", default=[], metavar="WORD", help="tuning problems whose name has every word"
    )
    _add_sizes(add, seqlen=None)
    add.add_argument("--list", action="store_true", help="print the names of the problems and stop")
    add.add_argument("--seconds", type=seconds, default=0.3, help="of a race, about")


def _add_tune(commands: Any) -> None:
    told = """Times the configs of a kernel row on this device, each checked first and held against the best
        so far, and keeps the quickest for later calls. Ctrl-C keeps what is known; the next run goes on from
        there."""
    about = "look for quicker configs on this device"
    add = _command(commands, "tune", "polyflash.tuning.command:run", about, told)
    _add_tuning(add)
    add.add_argument("--again", action="store_true", help="search anew what was searched before")
    add.add_argument("--forget", action="store_true", help="remove this device's tuned configs and stop")
    add.add_argument("--json", action="store_true", help="print JSON instead")


def _add_ablate(commands: Any) -> None:
    told = """One named switch of a kernel at a time against the config it chooses: outputs compared, calls
        timed in turns. Returns 1 if a switch changed a result by more than rounding."""
    about = "what each technique of a kernel is worth"
    add = _command(commands, "ablate", "polyflash.bench.ablation:run", about, told)
    _add_tuning(add)
    add.add_argument(
        "--switch", nargs="+", default=[], metavar="NAME", help="these fields alone: base2, num_stages=3 ..."
    )
    add.add_argument(
        "--groups", nargs="+", type=int, default=[], metavar="N",
        help="instead: the rows in N groups of one K/V set, walked together and one by one",
    )  # fmt: skip
    add.add_argument("--json", metavar="FILE", help="write every figure to FILE; Ctrl-C leaves what ran")
    add.add_argument("--page", metavar="FILE", help="write the tables to FILE as Markdown")


def _add_warmup(commands: Any) -> None:
    told = """Compiles ahead what calls of this shape need: prefill, a few rows, decode steps, with --grad
        their gradients. Prints each kernel with its seconds, and nothing for one that a cache has. Run it
        where the calls will run: in a container's build, or before a server starts."""
    about = "compile ahead what calls will need"
    add = _command(commands, "warmup", "polyflash.warmup:run", about, told)
    told = f"{', '.join(BY_NAME)}; bf16, fp16, fp32"
    add.add_argument("--dtype", type=_dtype, default="bfloat16", metavar="NAME", help=told)
    add.add_argument("--head-dim", type=_pair, default=(128, 128), metavar="QK/V")
    add.add_argument("--heads", type=_pair, default=(8, 8), metavar="Q/KV", help="32/8: grouped heads")
    names = tuple(warmup.FEATURES)
    add.add_argument(
        "--features",
        type=lambda text: _some_of(text, names),
        default=[],
        metavar="A,B",
        help=", ".join(names),
    )
    add.add_argument("--grad", action="store_true", help="gradients too")
    _add_device(add, "cpu unless given; cuda, cuda:1")
    add.add_argument("--jobs", type=_size, metavar="N", help="processes at once; one per core unless given")
