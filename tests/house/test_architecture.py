"""The house's laws, read off the syntax trees: import floors, no DSL in tables, banned constructs."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyflash
from tests.chosen import of_each

ROOT = Path(polyflash.__file__).parent
MODULES = {
    ".".join(("polyflash", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): p
    for p in sorted(ROOT.rglob("*.py"))
}

FLOORS = {
    0: ("errors", "dtypes", "env", "hints", "compilation", "cache", "advice"),
    1: ("target", "mask", "spec", "operands", "merging", "work", "quant.scheme"),
    2: (
        "reference",
        "workloads",
        "capability",
        "validate",
        "results",
        "storages",
        "likeness",
        "compare",
        "quant.codec",
        "quant.tensor",
        "kvcache.handles",
        "kvcache.layout",
        "kvcache.occupancy",
        "kvcache.pages",
        "kvcache.prefixes",
        "kvcache.rope",
        "kvcache.tables",
        "parallel.cost",
        "parallel.schedule",
        "parallel.joins",
    ),
    3: ("plan", "tuning.store"),
    4: ("backends",),
    5: (
        "torch_ops",
        "transforms",
        "arguments",
        "routes",
        "entry",
        "repeats",
        "counting",
        "quant.calls",
    ),
    6: ("api", "groups", "group_calls", "statistics", "quant", "kvcache", "parallel", "tuning"),
    7: (
        "webgpu",
        "integrations",
        "bench",
        "tuning.command",
        "quant.command",
        "parallel.command",
        "tuning.ablation",
        "cli",
        "commands",
        "options",
        "tensor_files",
        "doctor",
        "reports",
        "warmup",
        "__main__",
    ),
}
FLOOR = {f"polyflash.{name}": floor for floor, names in FLOORS.items() for name in names}
FLOOR["polyflash"] = 7
# On what an engine stands beside its own folder.
BELOW = {"triton": {"gpu"}, "gluon": {"gpu", "triton"}, "webgpu": {"gpu"}, "metal": {"gpu"}}
DSL = {"numba", "llvmlite", "triton", "wgpu", "gluon"}
TORCH_BELOW_2 = {"polyflash.merging"}  # floors 0 and 1 are plain data; target asks torch inside a function
BARE = frozenset(("Of", "That", "As", "With", "Who", "What", "Where", "Which"))  # no opening of a docstring
BANNED_NAMES = {"utils", "util", "helper", "helpers", "common", "fast", "optimized", "misc", "v2"}


def floor_of(module: str) -> int:
    while module:
        if module in FLOOR:
            return FLOOR[module]
        module = module.rpartition(".")[0]
    raise AssertionError(module)


def tree(module: str) -> ast.Module:
    return parsed(MODULES[module].read_text(encoding="utf-8"))


walked = functools.lru_cache(maxsize=len(MODULES))(lambda tree: tuple(ast.walk(tree)))
parsed = functools.lru_cache(maxsize=len(MODULES))(ast.parse)  # every law reads every module


def all_of(module: str) -> tuple[ast.AST, ...]:
    return walked(tree(module))


def imports(module: str, *, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Absolute names of what a module imports, with line numbers; TYPE_CHECKING blocks do not count."""
    stack: list[ast.AST] = [tree(module)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        if top_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in MODULES else node.module or "", node.lineno)
        stack.extend(ast.iter_child_nodes(node))


def backend_of(module: str) -> str:
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == "backends" else ""


def breaches(module: str) -> list[str]:
    found = []
    own = backend_of(module)
    for name, line in imports(module):
        if not name.startswith("polyflash"):
            continue
        other = backend_of(name)
        where = f"{module}:{line} imports {name}"
        if module == "polyflash.backends":
            if other and not name.endswith(".capabilities"):
                found.append(f"{where}: the table imports capabilities only")
        elif own:
            if other and other != own and other not in BELOW.get(own, ()):
                found.append(f"{where}: backends never meet")
            elif not other and floor_of(name) > 2:
                found.append(f"{where}: a backend stands on floors 0 to 2")
        elif other and floor_of(module) < 7:
            found.append(f"{where}: backends are reached through the table")
        elif floor_of(name) > floor_of(module):
            found.append(f"{where}: floor {floor_of(name)} from floor {floor_of(module)}")
    return found


@of_each(MODULES)
def test_import_floors(module: str):
    assert not breaches(module)


def test_every_module_has_a_floor():
    for module in MODULES:
        floor_of(module)
        assert module == "polyflash" or any(
            module == n or module.startswith(n + ".") for n in FLOOR if n != "polyflash"
        ), module


@of_each(MODULES)
def test_dsl_stays_in_its_backend(module: str):
    """No kernel DSL outside backends, and none at all in a table or a config module, which print on any
    machine."""
    tables = module.endswith((".capabilities", ".configs"))
    for name, line in imports(module):
        if name.split(".")[0] in DSL:
            allowed = backend_of(module) not in ("", "gpu") and not tables
            inside_function = (name, line) not in set(imports(module, top_level=True))
            assert allowed or (inside_function and not tables), f"{module}:{line} imports {name}"
        if module.endswith(".capabilities"):
            assert name.split(".")[0] != "torch", f"{module}:{line}: a table imports no torch"


@of_each(m for m in MODULES if FLOOR.get(m, 9) <= 1 or FLOOR.get(m) == 3)
def test_low_floors_are_plain_data(module: str):
    if module not in TORCH_BELOW_2:
        heavy = [
            (n, line)
            for n, line in imports(module, top_level=True)
            if n.split(".")[0] in {"torch", "numpy", *DSL}
        ]
        assert not heavy, heavy


@of_each(MODULES)
def test_only_env_reads_the_environment(module: str):
    if module == "polyflash.env":
        return
    for node in all_of(module):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        assert text not in ("os.environ", "os.getenv", "os.putenv", "os.environb"), f"{module}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not {"environ", "getenv"} & {a.name for a in node.names}, f"{module}:{node.lineno}"


@of_each(MODULES)
def test_banned_constructs(module: str):
    """No bare except, no assert, nothing that unpickles or evaluates text, no shell."""
    for node in all_of(module):
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{where}: bare except"
        assert not isinstance(node, ast.Assert), f"{where}: assert is not validation (python -O drops it)"
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("eval", "exec", "torch.load", "yaml.load", "os.system", "__import__"), (
                f"{where}: {name}"
            )
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                assert not (keyword.arg in ("shell", "allow_pickle") and value is True), (
                    f"{where}: {keyword.arg}=True"
                )
    for name, line in imports(module):
        assert name.split(".")[0] not in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, (
            f"{module}:{line}"
        )


@of_each(MODULES)
def test_public_functions_name_their_arguments(module: str):
    """None takes names it does not know, but to refuse every one of them in words (see hints.py)."""
    for node in all_of(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            if (kwarg := node.args.kwarg) is None or is_overload(node):
                continue
            first = ast.unparse(node.body[ast.get_docstring(node) is not None])
            refused = first == f"if unknown:\n    raise unexpected({node.name}, unknown)"
            refused = refused and ast.unparse(kwarg) == "unknown: Never"
            refused = refused and [ast.unparse(d) for d in node.decorator_list] == ["answering"]
            assert refused, f"{module}:{node.lineno}: {node.name} takes **{kwarg.arg}"


def is_overload(node: ast.AST) -> bool:
    """A signature for type checkers alone, which never runs."""
    return [ast.unparse(d) for d in getattr(node, "decorator_list", ())] == ["overload"]


def keywords_of(name: str) -> set[str]:
    """The keys of a TypedDict of keywords.pyi, those of its bases among them."""
    stub = ast.parse((ROOT / "keywords.pyi").read_text(encoding="utf-8"))
    (found,) = (x for x in stub.body if isinstance(x, ast.ClassDef) and x.name == name)
    bases = [ast.unparse(base) for base in found.bases if ast.unparse(base) != "TypedDict"]
    fields = {ast.unparse(x.target) for x in found.body if isinstance(x, ast.AnnAssign)}
    return fields.union(*map(keywords_of, bases))


@pytest.mark.parametrize("module", ["polyflash.api", "polyflash.groups", "polyflash.kvcache.cache"])
def test_overloads_name_what_their_function_takes(module: str):
    nodes = [n for n in all_of(module) if isinstance(n, ast.FunctionDef)]
    taken = {n.name: {a.arg for a in n.args.kwonlyargs} for n in nodes if not is_overload(n)}
    overloads = [n for n in nodes if is_overload(n)]
    for node in overloads:
        assert node.args.kwarg, f"{node.name} has no keywords"
        name = ast.unparse(node.args.kwarg.annotation).removeprefix("Unpack[").removesuffix("]")
        assert keywords_of(name) | {"return_lse"} == taken[node.name], f"{node.name}, {name}"
    assert overloads


@of_each(MODULES)
def test_options_are_given_by_name(module: str):
    for node in all_of(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Options":
            assert not node.args, f"{module}:{node.lineno}"


@of_each(MODULES)
def test_names_say_something(module: str):
    assert not BANNED_NAMES & set(module.split(".")), module
    for node in all_of(module):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert node.name.lower().strip("_") not in BANNED_NAMES, f"{module}:{node.lineno}: {node.name}"


@of_each(m for m in MODULES if MODULES[m].read_text(encoding="utf-8").strip())
def test_every_module_says_what_it_is(module: str):
    assert ast.get_docstring(tree(module)), module
    if tree(module).body[1:]:
        text = MODULES[module].read_text(encoding="utf-8")
        assert "from __future__ import annotations" in text or MODULES[module].name.startswith("__"), module


@of_each(MODULES)
def test_docstrings_open_with_a_verb_or_a_noun(module: str):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in all_of(module):
        opening = (ast.get_docstring(node) or " ").split(" ")[0] if isinstance(node, documented) else ""
        assert opening not in BARE, f"{module}:{getattr(node, 'lineno', 1)}: {opening} ..."


def test_the_law_can_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The walkers see a breach of each kind."""
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import numba\nfrom polyflash import api\nfrom polyflash.backends.torch import forward\n",
        encoding="utf-8",
    )
    for name in ("polyflash.plan", "polyflash.backends.cpu.forward"):
        monkeypatch.setitem(MODULES, name, bad)
        assert len(breaches(name)) == 2, name
    with pytest.raises(AssertionError):
        test_dsl_stays_in_its_backend.rule("polyflash.plan")
    bad.write_text("import os\ntry:\n    x = os.environ\nexcept:\n    assert 0\n", encoding="utf-8")
    for law in (test_banned_constructs, test_only_env_reads_the_environment):
        with pytest.raises(AssertionError):
            law.rule("polyflash.plan")
    bad.write_text('"""Of a key."""\n', encoding="utf-8")
    with pytest.raises(AssertionError):
        test_docstrings_open_with_a_verb_or_a_noun.rule("polyflash.plan")
    for first in ("if unknown:\n        raise unexpected(g, unknown)", "return unknown"):
        bad.write_text(f"@answering\ndef f(**unknown: Never):\n    {first}\n", encoding="utf-8")
        with pytest.raises(AssertionError):
            test_public_functions_name_their_arguments.rule("polyflash.plan")
