"""Prints the tables of docs/capabilities.md and docs/env.md from code: `python scripts/tables.py [--check]`.

Each page keeps its own words above the marker; below it stands what the code says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from polyflash import reports

DOCS = Path(__file__).resolve().parent.parent / "docs"
MARKER = "<!-- printed by scripts/tables.py; do not edit below -->"
PAGES = {"capabilities.md": reports.capability_table, "env.md": reports.variable_table}


def printed(name: str) -> str:
    """The whole page `name` as it should be."""
    above, marker, _ = (DOCS / name).read_text(encoding="utf-8").partition(MARKER)
    if not marker:
        raise SystemExit(f"{name}: got no marker, wanted {MARKER!r}. Add it where the table begins.")
    return f"{above}{MARKER}\n\n{PAGES[name]().rstrip()}\n"


def main() -> int:
    """Writes the pages; with --check names those that differ and returns 1."""
    changed = [name for name in PAGES if printed(name) != (DOCS / name).read_text(encoding="utf-8")]
    if "--check" in sys.argv[1:]:
        print(
            "\n".join(f"docs/{name} differs from the code: run python scripts/tables.py" for name in changed)
        )
        return 1 if changed else 0
    for name in changed:
        (DOCS / name).write_text(printed(name), encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
