"""Which of the package's refusals a test run produced: every place that makes one of its two errors.

`Refusals` is a pytest plugin, registered by tests/conftest.py. When a run was of the whole suite, places
that no test reached are listed at its end and fail it; workers of pytest-xdist hand theirs to the process
that started them. A run of selected tests is not judged.
"""

from __future__ import annotations

import ast
import functools
import sys
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import polyflash
from polyflash.errors import SpecError, UnsupportedError

PACKAGE = Path(polyflash.__file__).parent
MAKERS = ("spec_error", "SpecError", "UnsupportedError")
# Files whose cases stand beside their other tests, and where: all others have theirs in `CASES`.
BESIDE = {
    "integrations/": "tests/integrations",
    "bench/": "tests/null/test_bench*.py",
    "kvcache/": "tests/kvcache",
    "quant/": "tests/quant",
    "tuning/": "tests/null/test_tuning.py",
    "cli.py": "tests/tools/test_cli.py",
    "tensor_files.py": "tests/tools/test_cli.py",
    "parallel/": "tests/distributed",
    "backends/webgpu/": "tests/backends/webgpu",
    "webgpu.py": "tests/backends/webgpu",
}
# Places that no test of the default run can reach in its own process.
ELSEWHERE: dict[tuple[str, str], str] = {}


class Site(NamedTuple):
    file: str  # below the package
    function: str
    first: int  # lines of the call that makes the error
    last: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.first} {self.function}: {self.text}"


@functools.cache
def sites() -> list[Site]:
    """Every call in the package that makes an error of its own, read off the syntax trees."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {}
        for node in ast.walk(tree):  # outer functions first, so that the innermost stays
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside |= dict.fromkeys(ast.walk(node), node.name)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            maker = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if maker in MAKERS and name != "errors.py":
                text = " ".join(ast.unparse(node).split())[:90]
                found.append(Site(name, inside.get(node, ""), node.lineno, node.end_lineno or 0, text))
    return found


def missing(reached: set[tuple[str, int]], all_sites: list[Site]) -> list[Site]:
    """The sites none of these (file, line) lies in."""
    return [
        site
        for site in all_sites
        if not any(file == site.file and site.first <= line <= site.last for file, line in reached)
    ]


def advice(left: list[Site]) -> str:
    """Where cases of these sites go, and how one is written."""
    beside = {place for start, place in BESIDE.items() if any(site.file.startswith(start) for site in left)}
    said = [
        f"a test in {place}; `with pytest.raises(SpecError, match=...)` around the call"
        for place in sorted(beside)
    ]
    if any(not site.file.startswith(tuple(BESIDE)) for site in left):
        case = '"what is wrong": call(scale=float("inf"))'
        said.insert(
            0, f"a line in CASES of tests/null/test_refusals.py, such as `{case}`: a name, and what raises"
        )
    return "Every place that makes an error wants a case that reaches it: " + "; or ".join(said) + "."


class Refusals:
    """Records where errors are made while it watches."""

    def __init__(self) -> None:
        self.reached: set[tuple[str, int]] = set()
        self.whole = False

    def __enter__(self) -> Refusals:
        self._originals = {kind: kind.__init__ for kind in (SpecError, UnsupportedError)}
        for kind, original in self._originals.items():
            kind.__init__ = self._recording(original)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for kind, original in self._originals.items():
            kind.__init__ = original  # type: ignore[method-assign]

    def _recording(self, original: Any) -> Any:
        @wraps(original)
        def init(error: Any, *args: Any, **kwargs: Any) -> None:
            original(error, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._note(sys._getframe(1))

        return init

    def _note(self, frame: Any) -> None:
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE) and path.name != "errors.py":
                self.reached.add((path.relative_to(PACKAGE).as_posix(), frame.f_lineno))
                return
            frame = frame.f_back

    def pytest_collection_modifyitems(self, config: pytest.Config) -> None:
        option = config.option
        self.whole = not (option.keyword or config.args_source is not config.ArgsSource.TESTPATHS) and (
            option.markexpr == "not slow and not alone"
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        self.reached |= {(file, line) for file, line in output.get("refusals", ())}
        self.whole = self.whole or output.get("whole", False)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["refusals"], output["whole"] = sorted(self.reached), self.whole
        elif self.whole and session.exitstatus == 0 and self.left_out():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def left_out(self) -> list[Site]:
        found = missing(self.reached, sites())
        return [site for site in found if (site.file, site.function) not in ELSEWHERE]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        left = self.left_out() if self.whole else []
        if left:
            terminalreporter.section("refusals that no test produced")
        for site in left:
            terminalreporter.write_line(str(site))
        if left:
            terminalreporter.write_line(advice(left))
