"""Sizes: files, functions, the package, what an import pulls in, how many kernels an instruction set has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polyflash
from polyflash import target
from polyflash.spec import AttentionSpec, Phase
from tests import processes
from tests.backends.cpu import keys as every
from tests.chosen import of_each

ROOT = Path(polyflash.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
KERNEL_FILES = {
    "forward.py",
    "forward_kernel.py",
    "backward.py",
    "decode_few.py",
    "decode_many.py",
    "gradient_kernels.py",
    "quantize.py",
    "places.py",
    "scores.py",
    "blocks.py",
    "pool_kernel.py",
}
DEVICE_DECORATORS = {"njit", "cfunc", "intrinsic", "device", "kernel", "jit", "vectorize"}
HOST_LINES, DEVICE_LINES, FILE_LINES, KERNEL_FILE_LINES, INIT_LINES, PACKAGE_LINES = (
    60,
    140,
    500,
    600,
    40,
    53_572,
)
KEYS_PER_ISA = 64
SKIPPED = 41  # signatures and calls that no formatter lays out
LABORATORY_LINES = 6_288


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> list[tuple[str, int, bool]]:
    """(name, lines of code, is device code) of every function, nested ones within it included. Signature and
    docstring are documentation, not code. Device code is what a kernel compiler sees, or what builds it: in
    a backend a function that is decorated so, emits instructions, or holds one that does."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        size = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
        within = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
        found.append((node.name, size, "backends" in path.parts and any(map(is_device, within))))
    return found


def is_device(node: ast.FunctionDef) -> bool:
    names = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
    return bool(names & DEVICE_DECORATORS) or any(a.arg in ("e", "builder") for a in node.args.args)


@of_each(FILES)
def test_file_and_function_sizes(path: Path):
    kernel = path.parent.parent.name == "backends" and path.name in KERNEL_FILES
    limit = INIT_LINES if path.name == "__init__.py" else KERNEL_FILE_LINES if kernel else FILE_LINES
    assert lines(path) <= limit, f"{lines(path)} lines, at most {limit}"
    for name, size, device in functions(path):
        allowed = DEVICE_LINES if device else HOST_LINES
        assert size <= allowed, (
            f"{name}: {size} lines of {'device' if device else 'host'} code, at most {allowed}"
        )


DEVICE_PARAMETERS = 12


OF_DEVICES = [p for p in FILES if p.parent.name in ("triton", "gluon")]


@of_each(OF_DEVICES)
def test_signatures_of_device_functions(path: Path):
    """What belongs together comes in a named tuple."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            assert len(node.args.args) <= DEVICE_PARAMETERS, f"{node.name}: {len(node.args.args)} parameters"


def test_package_size():
    total = sum(lines(p) for p in ROOT.rglob("*") if p.suffix in (".py", ".wgsl", ".metal"))
    assert total <= PACKAGE_LINES, f"{total} lines; raise the ceiling only in a commit that says why"


def test_formatting_by_hand_is_rare():
    assert sum(p.read_text(encoding="utf-8").count("# fmt: skip") for p in FILES) < SKIPPED


def test_laboratory_size():
    """Held like the package's: it is built on its clocks, peaks and checks, and has no second of them."""
    total = sum(lines(p) for p in (ROOT.parents[1] / "benchmarks").rglob("*.py"))
    assert total <= LABORATORY_LINES, f"{total} lines; raise the ceiling only in a commit that says why"


def test_counting_can_fail(tmp_path: Path):
    long = tmp_path / "long.py"
    long.write_text("def f(\n    a,\n):\n    '''doc\n    '''\n" + "    a += 1\n" * 61, encoding="utf-8")
    assert functions(long) == [("f", 61, False)]
    folder = tmp_path / "backends" / "cpu"
    folder.mkdir(parents=True)
    kernel = folder / "forward.py"
    kernel.write_text(
        "@njit(x=1)\ndef f(a):\n" + "    a += 1\n" * 61 + "def g(self, e):\n    pass\n"
        "def build(key):\n    @block.device\n    def inner(a):\n        pass\n    return inner\n",
        encoding="utf-8",
    )
    sizes = [("f", 61, True), ("g", 1, True), ("build", 3, True), ("inner", 1, True)]
    assert functions(kernel) == sizes


def python(code: str) -> str:
    done = processes.begun(["-c", code])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_pulls_in_nothing_heavy_and_has_no_side_effects():
    """S21: no threads, no device, no files, no output."""
    heavy = {"numba", "llvmlite", "rich", "matplotlib", "transformers", "triton", "wgpu", "safetensors"}
    said = python(
        "import torch, threading, sys; t, n = torch.get_num_threads(), threading.active_count()\n"
        "before = set(sys.modules); import polyflash\n"
        f"print(({heavy!r} & set(sys.modules)) - before or 'none', torch.get_num_threads() == t,"
        " threading.active_count() == n, torch.cuda.is_initialized())"
    )
    assert said == "none True True False", said


def test_explaining_and_tables_need_no_compiler():
    """Plans, keys and the whole table print without importing a kernel DSL."""
    said = python(
        "import sys, torch, polyflash; q = torch.empty(1, 8, 64, 64, device='meta');"
        "str(polyflash.explain(q, q, q)); str(polyflash.explain(q, q, q, target='cuda:sm90'));"
        "print([m for m in ('numba', 'llvmlite', 'triton') if m in sys.modules])"
    )
    assert said == "[]", said


@pytest.mark.parametrize("known", target.KNOWN, ids=lambda t: f"{t.name}+{'+'.join(sorted(t.features))}")
def test_kernel_keys_are_bounded(known: target.Target):
    keys = list(every.forward(known))
    assert len(keys) <= KEYS_PER_ISA and len(set(keys)) == len(keys)
    assert len({key.name for key in keys}) == len(keys)


def test_every_call_has_a_listed_key():
    """`every.forward` is complete: what a plan can ask for, over lengths, dims and dtypes, is in it."""
    from polyflash.backends.cpu import configs

    for known in (target.parse("cpu:avx512+avx512_bf16"), *target.KNOWN[:4]):
        listed = set(every.forward(known))
        for dtype in configs.STORAGE_BYTES:
            for rows in (1, 2, 15, 16, 17, 32, 33, 64, 65, 1000, 1 << 20):
                for dim in (1, 3, 64, 65, 128, 129, 256, 257, 512, 576):
                    spec = AttentionSpec(
                        Phase.FORWARD, dtype, "cpu", 1, 8, 8, rows, rows, dim, dim, frozenset()
                    )
                    config = configs.choose(spec, known)
                    nv = configs.panel_vectors(config.isa, rows)
                    assert configs.key_for(config, dtype, dim, nv) in listed
                    assert configs.ScoreKey(config.isa, nv) in listed
