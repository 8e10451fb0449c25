"""Arguments of the command line: every command's options, their types, and what is wrong with a value.

Standard library only, so that `--help` takes no time and reports are made where torch is broken. A command's
code is named by its place and imported when it runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polyflash import doctor, reports, warmup
from polyflash.dtypes import BY_NAME
from polyflash.quant.scheme import NAMED
from polyflash.spec import Feature

ALIGNMENTS = ("bottom_right", "top_left")
# Features that `explain` imagines; others are said by options of their own, or by sizes.
_SAID = {
    "causal",
    "window",
    "paged",
    "row_bounds",
    "gqa",
    "head_dim_v",
    "codes",
    "wide_gradients",
    "dropout_start",
}
FEATURES = tuple(sorted({f.name.lower() for f in Feature} - _SAID))
PHASES = ("forward", "backward", "statistics")
FILES = (".safetensors", ".npz", ".npy")
_PAIR = "a number, or two as in 8/2"
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
    _add_quant(commands)
    _add_parallel_plan(commands)
    _add_reports(commands)
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
        told = f"torch {torch.__version__} finds no GPU here. Leave it out"
        raise UsageError(f"--device: got {name}, and {told}")
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    if index >= count:
        raise UsageError(f"--device: got {name}, wanted cuda:0 to cuda:{count - 1}")
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _refusal(text: str, wanted: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"got {text!r}, wanted {wanted}")


def _device(text: str) -> str:
    kind, colon, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not index.isdecimal())):
        raise _refusal(text, "cpu, cuda or cuda:N")
    return text


def _backend(text: str) -> str:
    from polyflash.backends import BACKENDS

    if text not in BACKENDS:
        raise _refusal(text, f"one of {', '.join(BACKENDS)}")
    return text


def _dtype(text: str) -> str:
    name = _SHORT.get(text.lower(), text.lower())
    if name not in BY_NAME:
        raise _refusal(text, f"one of {', '.join((*BY_NAME, *_SHORT))}")
    return name


def _number(text: str, wanted: str = "a whole number") -> int:
    if not text.isdecimal() or len(text) > 18:  # 64 bits hold what has 18 digits
        raise _refusal(text, f"{wanted}, of 18 digits at most")
    return int(text)


def _size(text: str, wanted: str = "a whole number") -> int:
    number = _number(text, wanted)
    if not number:
        raise _refusal(text, "1 or more")
    return number


def _pair(text: str) -> tuple[int, int]:
    """'8/2' -> (8, 2); '8' -> (8, 8)."""
    first, slash, second = text.partition("/")
    words = (first, second) if slash else (first, first)
    return _size(words[0], _PAIR), _size(words[1], _PAIR)


def _heads(text: str) -> tuple[int, int]:
    """Query heads over key/value heads."""
    heads, kv_heads = _pair(text)
    if heads % kv_heads:
        got = f"{heads} query heads over {kv_heads} key/value heads"
        raise argparse.ArgumentTypeError(f"got {got}, wanted a whole number of them for each, as in 8/2")
    return heads, kv_heads


def _window(text: str) -> tuple[int | None, int | None]:
    try:
        left, right = (None if x.strip().lower() in ("", "none") else int(x) for x in text.split(","))
    except ValueError:
        raise _refusal(text, "LEFT,RIGHT such as 255,0 or 255,none") from None
    return left, right


def seconds(text: str) -> float:
    """A positive number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise _refusal(text, "a positive number")
    return number


def _range(text: str) -> tuple[float, float]:
    """'8..64' -> (8, 64); '8' -> (8, 8)."""
    first, dots, last = text.partition("..")
    ends = seconds(first), seconds(last if dots else first)
    if not 1 <= ends[0] <= ends[1] <= 1e12 or any(x % 1 for x in ends):
        raise _refusal(text, "a whole number, or two in rising order as 8..64")
    return ends


_RATES = {"GB/s": 1e9, "Gb/s": 1e9 / 8, "TB/s": 1e12, "Tb/s": 1e12 / 8}


def _links(text: str) -> list[float]:
    """'450GB/s,400Gb/s' -> bytes/s."""
    found = []
    for word in text.split(","):
        unit = next((unit for unit in _RATES if word.endswith(unit)), None)
        if unit is None:
            raise _refusal(word, f"a rate in {', '.join(_RATES)}, as in 450GB/s")
        found.append(seconds(word.removesuffix(unit)) * _RATES[unit])
    if not 1 <= len(found) <= 2:
        raise _refusal(text, "one rate, or two: within a node and between nodes")
    return found


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes names of `known`, any names if there are none."""

    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := [name for name in found if known and name not in known]:
            raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}, wanted some of {', '.join(known)}")
        if not found:
            raise _refusal(text, f"some of {', '.join(known)}" if known else "names, with commas between")
        return found

    return names


def _file(text: str) -> str:
    """A file that may be written, as far as folders tell: what a long measurement found would be lost."""
    if Path(text).is_dir() or not Path(text).absolute().parent.is_dir():
        raise _refusal(text, "a file in a folder that is there")
    return text


def _command(commands: Any, name: str, place: str, about: str, description: str) -> _Options:
    add = _Options(commands.add_parser(name, help=about, description=description))
    add.parser.set_defaults(command=place)
    add.flag("--quiet", "results only: no progress, no commentary")
    return add


class _Options:
    """The options of one command: a call with name and help adds one, the methods those of several."""

    def __init__(self, parser: Any) -> None:
        self.parser = parser

    def __call__(self, name: str, told: str | None = None, *others: str, **how: Any) -> None:
        self.parser.add_argument(name, *others, help=told, **how)

    def flag(self, name: str, told: str) -> None:
        self(name, told, action="store_true")

    def names(self, name: str, told: str, known: Sequence[str] = ()) -> None:
        self(name, told, type=_some_of(known), default=[], metavar="A,B" if known else "NAME,NAME")

    def file(self, name: str, told: str) -> None:
        self(name, told, type=_file, metavar="FILE")

    def words(self, name: str, told: str, metavar: str = "WORD", *, kind: Any = str, to: str = "") -> None:
        to = to or name.removeprefix("--")
        self(name, told, nargs="+", default=[], metavar=metavar, type=kind, dest=to)

    def device(self, told: str) -> None:
        self("--device", told, type=_device, metavar="NAME")

    def dtype(self, default: str | None) -> None:
        told = f"{', '.join(BY_NAME)}; bf16, fp16, fp32"
        self("--dtype", told, type=_dtype, default=default, metavar="NAME")

    def problem(self, *, device: str, dtype: str | None) -> None:
        self("--causal", "causal; alone, it is bottom_right", choices=ALIGNMENTS, metavar="top_left")
        self.dtype(dtype)
        self("--backend", "cpu, gluon, triton, webgpu, metal or torch", type=_backend, metavar="NAME")
        self.device(device)

    def window(self) -> None:
        told = "neighbours each side, self not counted; none is unbounded"
        self("--window", told, type=_window, metavar="L,R")
        self.flag("--json", "print JSON instead")

    def heads(self, told: str) -> None:
        self("--heads", told, type=_heads, default=(8, 8), metavar="Q/KV")

    def sizes(self, seqlen: tuple[int, int] | None) -> None:
        self("--batch", type=_size, default=1)
        self.heads("8/2: 8 query heads over 2 key/value heads")
        told = None if seqlen else "one problem of these lengths instead"
        self("--seqlen", told, type=_pair, default=seqlen, metavar="Q/K")
        self("--head-dim", type=_pair, default=(64, 64), metavar="QK/V")

    def tuning(self) -> None:
        """Adds what `tune` and `ablate` share: which problems, of which kernels, and for how long."""
        self.problem(device="cuda if there is one, else cpu; cuda:1", dtype="bfloat16")
        told = f"{', '.join(PHASES)}; forward is decode too, where rows are few"
        self("--phase", told, type=_some_of(PHASES), default=["forward"], metavar="A,B")
        self.words("--filter", "tuning problems whose name has every word")
        self.sizes(None)
        self.flag("--list", "print the names of the problems and stop")
        self("--seconds", "of a race, about", type=seconds, default=0.3)


def _add_run(commands: Any) -> None:
    told = "Attention on Q, K, V from files: output and lse, with plan, time and error."
    add = _command(commands, "run", "polyflash.commands:run", "attention on Q, K, V from files", told)
    add.problem(device="cpu unless given; cuda, cuda:1", dtype=None)
    add.window()
    add("files", "one .safetensors or .npz, or three .npy: q, k, v", nargs="+", metavar="FILE")
    for role in ("q", "k", "v"):
        add(f"--{role}", f"tensor to take for {role}", metavar="NAME")
    add("--layout", "axis order; the batch may be missing", choices=("bhsd", "bshd"), default="bhsd")
    add("--scale", "multiplies q·k; 1/sqrt(head_dim) unless given", type=float)
    add("-o", "write output and lse here", "--output", type=_file, metavar="OUT")


def _add_explain(commands: Any) -> None:
    about = "which kernel would run, and why no other"
    told = "Which kernel would run a problem that exists only as sizes, on a device that need not be here."
    add = _command(commands, "explain", "polyflash.commands:explain", about, told)
    add.problem(device="a device of this machine: cpu unless given; cuda, cuda:1", dtype="float32")
    add.window()
    add.sizes((2048, 2048))
    add.names("--features", ", ".join(FEATURES), FEATURES)
    add.flag("--grad", "plan the gradients too")
    add("--quant", f"k and v as codes: {', '.join(NAMED)}", choices=tuple(NAMED), metavar="NAME")
    add("--target", "a device that need not be here: cuda:sm90, cpu:avx512+amx_bf16", metavar="NAME")


def _add_bench(commands: Any) -> None:
    about = "this machine against torch SDPA and others"
    told = "This machine against torch SDPA and the other attention implementations found on it."
    add = _command(commands, "bench", "polyflash.bench.command:run", about, told)
    add.parser.set_defaults(size="")
    add.device("cpu unless given; cuda, cuda:1")
    told = "dense, windows, small and some of backward unless given; masks, bias, varlen, backward, decode,"
    add.names("--suite", f"{told} peers; all")
    add.names("--peers", "the suite peers, with these alone")
    add("--rows", "these rows alone", default="", metavar="NAME,NAME")
    add.words("--filter", "rows whose name has every word: causal bfloat16 d64")
    add.flag("--list", "print the names of the rows and stop; with --from, of marked ones")
    size = _Options(add.parser.add_mutually_exclusive_group())
    size("--quick", "short rows, short times", dest="size", action="store_const", const="quick")
    size("--long", "8192 keys too, backward 4096", dest="size", action="store_const", const="long")
    add.flag("--calls", "where the time of one tiny call goes")
    add("--seconds", "per row; 2, or 0.5 with --quick", type=seconds)
    add.file("--json", "write every round to FILE; Ctrl-C leaves what ran")
    add.file("--page", "write the tables to FILE as a Markdown page")
    add.file("--plot", "draw the steps of the suite decode")
    told = "measure nothing: take the rows of these JSON files, a later file's first"
    add.words("--from", told, "FILE", to="sources")


def _add_tune(commands: Any) -> None:
    told = """Times the configs of a kernel row on this device, each checked first and held against the best
        so far, and keeps the quickest for later calls. Ctrl-C keeps what is known; the next run goes on from
        there."""
    about = "look for quicker configs on this device"
    add = _command(commands, "tune", "polyflash.tuning.command:run", about, told)
    add.tuning()
    add.flag("--again", "search anew what was searched before")
    add.flag("--forget", "remove this device's tuned configs and stop")
    add.flag("--json", "print JSON instead")


def _add_ablate(commands: Any) -> None:
    told = """One named switch of a kernel at a time against the config it chooses: outputs compared, calls
        interleaved. Returns 1 if a switch changed a result by more than rounding."""
    about = "what each technique of a kernel is worth"
    add = _command(commands, "ablate", "polyflash.tuning.ablation:run", about, told)
    add.tuning()
    add.words("--switch", "these fields alone: base2, num_stages=3 ...", "NAME")
    told = "instead: the rows in N groups of one K/V set, walked together and one by one"
    add.words("--groups", told, "N", kind=int)
    add.file("--json", "write every figure to FILE; Ctrl-C leaves what ran")
    add.file("--page", "write the tables to FILE as Markdown")


def _add_warmup(commands: Any) -> None:
    told = """Compiles ahead what calls of this shape need: prefill, a few rows, decode steps, with --grad
        their gradients. Names of codes among the features (int8, fp8 ...) quantise k and v; with paged, a
        cache appends them. Prints each kernel with its seconds, and nothing for one that a cache has. Run it
        where the calls will run: in a container's build, or before a server starts."""
    add = _command(commands, "warmup", "polyflash.warmup:run", "compile ahead what calls will need", told)
    add.dtype("bfloat16")
    add("--head-dim", type=_pair, default=(128, 128), metavar="QK/V")
    add.heads("32/8: grouped heads")
    add.names("--features", ", ".join(warmup.FEATURES), tuple(warmup.FEATURES))
    add.flag("--grad", "gradients too")
    add.device("cpu unless given; cuda, cuda:1")
    add("--jobs", "processes at once; one per core unless given", type=_size, metavar="N")


def _add_quant(commands: Any) -> None:
    told = """What codes for k and v cost: errors of the output of attention, by scheme, on six families of
        inputs and on tensors of a file."""
    add = _command(commands, "quant", "polyflash.quant.command:report", "what quantised k and v cost", told)
    add("action", choices=("report",))
    add("--data", "a .safetensors or .npz with q, k, v (batch, heads, seqlen, head_dim) too", metavar="FILE")
    for role in ("q", "k", "v"):
        add(f"--{role}", f"tensor to take for {role}", metavar="NAME")
    add("--causal", "causal; alone, it is bottom_right", choices=ALIGNMENTS, metavar="top_left")
    add("--seed", "of the families", type=_number, default=0)
    told = "relative (L2) unless given; centred, worst_row, cosine, largest"
    measures = ("relative", "centred", "worst_row", "cosine", "largest")
    add("--measure", told, choices=measures, default="relative", metavar="NAME")
    add("--error", "recommend schemes for this relative L2 too", type=seconds, metavar="E")
    add.flag("--json", "print JSON instead")
    add("--speed", "time decode of a token over so many keys on this CPU too", type=_size, metavar="KEYS")
    told = "draw errors against bits per value; with --speed, against the speed of decode"
    add("-o", told, "--output", type=_file, metavar="PLOT")


def _add_parallel_plan(commands: Any) -> None:
    told = """What both passes of one attention layer cost when its tokens are spread over ranks: time, memory
        and bytes by exchange, from rates that are given, for machines that need not be here."""
    about = "one sequence over ranks that need not be here"
    add = _command(commands, "parallel-plan", "polyflash.parallel.command:plan", about, told)
    few, many = (1e6, 1e8), (8.0, 4096.0)
    add(
        "--tokens",
        "of the sequence: 1e6, or 1e6..1e8 in powers of 10",
        type=_range,
        default=few,
        metavar="A..B",
    )
    add("--ranks", "in powers of 8 from the first one on", type=_range, default=many, metavar="A..B")
    told = "of a rank: within a node, and between nodes; GB/s, or Gb/s for bits"
    add("--link", told, type=_links, default=_links("450GB/s,400Gb/s"), metavar="FAST,SLOW")
    add("--node", "ranks of a node", type=_size, default=8, metavar="N")
    add("--latency", "of an exchange, in seconds", type=seconds, default=2e-5)
    add("--tflops", "that attention reaches on a rank, forward and backward", type=seconds, default=450.0)
    add("--memory", "of a rank, in GB", type=seconds, default=80.0, metavar="GB")
    add("--dtype", ", ".join((*BY_NAME, *_SHORT)), type=_dtype, default="bfloat16", metavar="NAME")
    add("--heads", "query/key heads", type=_heads, default=(32, 8), metavar="Q/KV")
    add("--head-dim", type=_pair, default=(128, 128), metavar="QK/V")
    add("--window", "keys that a row sees before its own; all unless given", type=_number, metavar="LEFT")
    add.flag("--full", "no causal mask")
    add.flag("--json", "print JSON instead")


def _add_reports(commands: Any) -> None:
    """Commands that need neither torch nor a console."""
    for name, run, about in (
        ("doctor", doctor.run, "does every kernel of this machine compute what it should"),
        ("env", reports.show_env, "versions, CPU, limits, settings and rows, for a report"),
        ("cache", reports.manage_cache, "the folder of compiled kernels"),
    ):
        add = _Options(commands.add_parser(name, help=about, description=run.__doc__))
        add.parser.set_defaults(command=run)
        if name == "cache":
            add("action", choices=("ls", "clear", "path"))
            add.flag("--stale", "clear: only what this version does not load")
        add.flag("--json", "ls: print JSON instead" if name == "cache" else "print JSON instead")
