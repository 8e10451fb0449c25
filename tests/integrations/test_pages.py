"""The code blocks of pages run, and those of docs/migrate.md give what the call beside them gives."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import peers

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
WIDEST = 110
FRAGMENT = "# goes on from the block above"  # the first line of a block that does not run by itself


def blocks(page: str) -> list[str]:
    """The `python` blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def run(page: str, block: str, names: dict[str, Any]) -> None:
    exec(compile(block, page, "exec"), names)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_calls_of_other_libraries_equal_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in peers.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    names: dict[str, Any] = {}
    pairs = 0
    for block in blocks("docs/migrate.md"):
        run("docs/migrate.md", block, names)
        if "theirs" in names:
            torch.testing.assert_close(names.pop("ours"), names.pop("theirs"))
            pairs += 1
    assert pairs == 19


RUN = ("concepts", "flash-attn", "groups", "kvcache", "observing", "quantisation", "sdpa", "statistics")


@pytest.mark.parametrize("page", ["README.md", "docs/torch.md", *(f"docs/{name}.md" for name in RUN)])
def test_examples_run(page: str) -> None:
    """Each by itself, but for fragments."""
    names: dict[str, Any] = {}
    for block in blocks(page):
        if "from transformers" not in block:  # a model from elsewhere
            names = names if block.startswith(FRAGMENT) else {}
            run(page, block, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_define_what_they_use(page: Path) -> None:
    """Those too that need a GPU, a model or several processes. On the page of other libraries all go on."""
    known: set[str] = set()
    for block in blocks(page.relative_to(ROOT).as_posix()):
        if page.name != "migrate.md" and not block.startswith(FRAGMENT):
            known = set()
        used = set()
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else known).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.arg)):
                known.add(node.name if isinstance(node, ast.FunctionDef) else node.arg)
            elif isinstance(node, ast.alias):
                known.add((node.asname or node.name).partition(".")[0])
        unknown = used - known - set(dir(builtins))
        assert not unknown, f"{sorted(unknown)} in {block}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_not_too_wide(page: Path) -> None:
    """Tables and links cannot be broken, and what a script prints is as wide as it is."""
    written = page.read_text("utf-8").partition("<!-- printed by")[0]
    lines = enumerate(written.splitlines(), 1)
    wide = [n for n, line in lines if len(line) > WIDEST and not line.startswith("|") and "](" not in line]
    assert not wide, f"lines {wide} have more than {WIDEST} columns"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text("utf-8")):
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{path} does not exist"
        assert not anchor or anchor in anchors(there), f"{path or page.name} has no heading #{anchor}"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    links = re.findall(r"\]\(([^)#]*)", index.read_text("utf-8"))
    named = {(index.parent / path).resolve() for path in links}
    assert named == {page for page in PAGES if page not in (index, ROOT / "README.md")}
