"""`polyflash run | explain | bench | tune | ablate | warmup | quant | parallel-plan | doctor | env | cache`:
the public functions on files, on imagined problems and against torch SDPA, and kernels against themselves.

Exit codes: 0 done; 1 an error, a refusal or a mismatch; 2 wrong usage; 130 Ctrl-C; 141 nobody reads on."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import polyflash
from polyflash import env, options

if TYPE_CHECKING:
    from rich.console import Console

_ASCII = {"×": "x", "·": "*", "±": "+-", "µ": "u", "→": ">", "—": "-", "…": "...", "²": "^2", "°": " deg "}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        _make_printable(stream)
    try:
        code = _run(options.with_alignment(sys.argv[1:] if argv is None else argv))
        print(end="", flush=True)  # where there is an output to flush
        return code
    except BrokenPipeError:  # `polyflash bench --list | head`
        _let_go()
        return 141
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"error {named}", file=sys.stderr)
        _let_go()
        return 1
    except KeyboardInterrupt as stop:
        print(f"interrupted{stop}", file=sys.stderr)
        return 130


def _let_go() -> None:
    """Drops what the output does not take, or the interpreter would complain as it ends, with a code of its
    own."""
    try:
        print(end="", flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str]) -> int:
    parser = options.parser(polyflash.__version__)
    try:
        chosen = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message
        return stop.code if isinstance(stop.code, int) else 2
    if not hasattr(chosen, "command"):
        parser.print_help()
        return 2
    if callable(chosen.command):
        return int(chosen.command(chosen))
    return _command(chosen)


def _command(chosen: argparse.Namespace) -> int:
    """Runs a command that has a console to print on, and needs torch."""
    from rich.markup import escape

    from polyflash.errors import SpecError, UnsupportedError

    out, err = _console(), _console(stderr=True)
    place, _, name = chosen.command.partition(":")
    try:
        module = import_module(place)
    except (ImportError, OSError) as error:  # of torch, mostly, whose libraries are a system's
        told = f"{type(error).__name__}: {error}. `polyflash doctor` knows more"
        err.print(f"[bold red]error[/] {escape(told)}", soft_wrap=True)
        return 1
    try:
        return int(getattr(module, name)(chosen, out, err))
    except options.UsageError as error:
        code, text = 2, str(error)
    except Exception as error:
        import torch  # whose error of a GPU's memory is its own, and has no class for a CPU's

        ours = (SpecError, UnsupportedError, MemoryError, torch.cuda.OutOfMemoryError)
        if not isinstance(error, ours) and "can't allocate memory" not in str(error):
            raise
        code, text = 1, str(error).rpartition("CPUAllocator: ")[2] or "out of memory"
    err.print(f"[bold red]error[/] {escape(text)}", soft_wrap=True)
    return code


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:  # rich ends the process here; commands have files to write
            raise BrokenPipeError

    made = Plain(no_color=env.NO_COLOR.read() != "", highlight=False, stderr=stderr)
    if not made.width:  # COLUMNS=0
        made.width = 80
    return made


def _make_printable(stream: object) -> None:
    """Lets a terminal of any encoding print what we say, if need be in other signs."""
    codecs.register_error("polyflash", _in_ascii)
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="polyflash")


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    if any(sign in _ASCII for sign in text):
        return "".join(_ASCII.get(sign, "?") for sign in text), error.end
    return codecs.backslashreplace_errors(error)


if __name__ == "__main__":
    sys.exit(main())
