"""`polyflash env` and `polyflash cache`, and the tables of docs/: what is here, printed from code.

Standard library and plain data only, so that a report can be made where torch is absent or does not import;
what needs numpy too is imported where it is used."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import polyflash
from polyflash import env, target
from polyflash.spec import AttentionSpec

if TYPE_CHECKING:
    from polyflash.advice import Report
    from polyflash.capability import Capability

# The oldest version that works, "" for any; as in pyproject.toml. The first two are needed by every call.
PACKAGES = {
    "torch": "2.6",
    "numpy": "1.26",
    "numba": "0.62",
    "llvmlite": "",
    "rich": "13",
    "safetensors": "",
    "transformers": "",
    "triton": "3.6",
    "wgpu": "0.32",
}
PROBE_SECONDS = 60.0
_PROBE = (
    "import json, torch; print(json.dumps({'version': torch.__version__, 'threads': torch.get_num_threads(),"
    " 'cuda': torch.version.cuda or torch.version.hip or '', 'hip': bool(torch.version.hip),"
    " 'gpus': torch.cuda.device_count(), 'mps_built': torch.backends.mps.is_built(),"
    " 'mps': torch.backends.mps.is_available()}))"
)


def show_env(options: argparse.Namespace, *_: object) -> int:
    """Facts for a bug report: versions, CPU, limits, cache, variables and rows."""
    found = facts()
    print(json.dumps(found, indent=1) if options.json else text_of(found))
    return 0


def manage_cache(options: argparse.Namespace, *_: object) -> int:
    """Lists or clears the compiled kernels of this user. What is cleared is compiled again when needed."""
    store, origin = next(filter(None, (report.kernel_cache() for report in of_backends())))
    if options.action == "path":
        print(store.path())
        return 0
    if options.action == "clear":
        if options.stale and not origin:
            print("error --stale: no compiler here says what is current. Install numba", file=sys.stderr)
            return 1
        removed = store.clear(origin=origin if options.stale else b"")
        print(f"removed {removed} {'entry' if removed == 1 else 'entries'} from {store.path()}")
        return 0
    try:
        entries = store.entries(origin)
    except OSError as error:
        print(f"error {error}", file=sys.stderr)
        return 1
    if options.json:
        content = {"schema": "polyflash.cache/1", "path": store.path(), "entries": list(map(asdict, entries))}
        print(json.dumps(content, indent=1))
        return 0
    words = {True: "stale", False: "current", None: "unknown"}
    about = ((e.key or "unreadable", e.bytes, e.days, words[e.stale], e.file[:12]) for e in entries)
    lines = [(key, f"{size:,}", f"{days:.1f}", state, file) for key, size, days, state, file in about]
    print(columns([("key", "bytes", "days unused", "state", "file"), *lines]) if lines else "no entries")
    print(f"{len(lines)} in {store.path()}, {sum(e.bytes for e in entries):,} bytes")
    return 0


def of_backends() -> list[Report]:
    """The report of every backend."""
    from polyflash import backends

    return [backends.report_of(name) for name in backends.BACKENDS]


def facts() -> dict[str, Any]:
    """Everything `polyflash env` says, as plain data. What cannot be found out holds an "error" instead."""
    return {
        "schema": "polyflash.env/1",
        "polyflash": polyflash.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "packages": {n: {"version": target.installed_version(n), "wanted": w} for n, w in PACKAGES.items()},
        "torch": probe_torch(),
        **{name: _safely(section) for name, section in _sections().items()},
        "variables": [
            {"name": v.name, "value": v.read(), "default": v.default}
            | {"set": v.read() != v.default, "doc": v.doc}
            for v in (*env.ALL, *env.OF_OTHERS)
        ],
        "rows": _safely(_rows),
    }


def probe_torch() -> dict[str, Any]:
    """A fresh process's report on torch: version and threads, or the error its import ends with."""
    try:
        command = [sys.executable, "-c", _PROBE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    if done.returncode == 0:
        try:
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except (ValueError, IndexError):
            return {"error": f"import torch printed {done.stdout[-200:]!r}"}
    said = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return {"error": f"import torch ended by signal {-done.returncode}"}
    return {"error": said[-1] if said else f"import torch ended with exit code {done.returncode}"}


def text_of(found: dict[str, Any]) -> str:
    """`facts()` for people, 110 columns at most."""
    torch = found["torch"]
    about_torch = f"does not import: {torch['error']}" if "error" in torch else f"{torch['threads']} threads"
    packages = [
        (name, p["version"] or "absent", f"wanted {p['wanted']}" if p["wanted"] else "", about)
        for name, p in found["packages"].items()
        for about in (about_torch if name == "torch" else "",)
    ]
    variables = [(v["name"], repr(v["value"]) if v["set"] else "unset", v["doc"]) for v in found["variables"]]
    return "\n".join(
        (
            f"polyflash {found['polyflash']}, {found['python']}, {found['platform']}",
            _headed("packages", columns(packages)),
            *(_headed(name, _pairs(found[name])) for name in _sections()),
            _headed("variables", columns(variables)),
            _headed("rows", _row_lines(found["rows"])),
        )
    )


def label(row: Capability) -> str:
    """The row's name; with its targets if another row has the same."""
    from polyflash.backends import TABLE

    if [r.name for r in TABLE].count(row.name) < 2:
        return row.name
    return f"{row.name} ({', '.join(name or 'any' for name in row.targets)})"


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Rows of words in aligned columns."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = ([f"{w:<{n}}" for w, n in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(words).rstrip() for words in aligned)


def _sections() -> dict[str, Callable[[], Any]]:
    """The CPU, and what each backend knows of its surroundings."""
    sections: dict[str, Callable[[], Any]] = {"cpu": _cpu}
    try:
        for report in of_backends():
            sections |= report.facts()
    except ImportError:  # of numpy, which the table of kernels needs
        sections["backends"] = lambda: {"reports": len(of_backends())}
    return sections


def _cpu() -> dict[str, Any]:
    device = target.detect("cpu")
    return {"model": target.cpu_name(), "target": str(device), "flags": sorted(target.cpu_flags())}


def _rows() -> list[dict[str, Any]]:
    from polyflash.backends import TABLE

    here = target.detect("cpu")
    rows = []
    for row in TABLE:
        spec = AttentionSpec(row.phase, max(row.dtypes), "cpu", 1, 1, 1, 64, 64, 64, 64, frozenset())
        targets, features = [name or "any" for name in row.targets], sorted(f.value for f in row.features)
        facts = {"row": label(row), "targets": targets, "dtypes": sorted(row.dtypes), "features": features}
        refusals = row.reasons_against(spec, here, by_name=True)
        rows.append(facts | {"needs": list(row.needs), "refusals here": list(refusals)})
    return rows


def _safely(find: Callable[[], Any]) -> Any:
    """The result of `find`, or its error as data: a report must not end where the trouble is."""
    try:
        return find()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _headed(title: str, body: str) -> str:
    return f"\n{title}\n{textwrap.indent(body, '  ')}"


def _pairs(found: dict[str, Any]) -> str:
    lines = []
    for name, value in found.items():
        words = " ".join(value) if isinstance(value, list) else "none" if value in (None, "") else str(value)
        lines.append(textwrap.fill(f"{name}: {words}", 108, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


def _row_lines(rows: Any) -> str:
    if isinstance(rows, dict):
        return _pairs(rows)
    about = ((row["row"], ", ".join(row["needs"] or ["torch"]), row["refusals here"]) for row in rows)
    return columns([(name, f"needs {needs}", "; ".join(why) or "runs here") for name, needs, why in about])
