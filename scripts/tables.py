"""Prints docs/capabilities.md, docs/env.md, docs/api.md and docs/quantisation.md from code:
`python scripts/tables.py [--check]`.

Each page keeps its own words above the marker; below it stands what the code says. An error that is measured
keeps the digits it was printed with as long as it is within one of the last: machines round differently.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch

import polyflash
from polyflash import backends, env
from polyflash.capability import Capability
from polyflash.quant import choosing, dequantize, families, quantize, recommend_scheme
from polyflash.quant.command import in_short, measured
from polyflash.reports import label
from polyflash.spec import Feature

DOCS = Path(__file__).resolve().parent.parent / "docs"
MARKER = "<!-- printed by scripts/tables.py; do not edit below -->"
WIDTH = 104
PACKAGE = Path(polyflash.__file__).parent

# What docs/api.md shows: a heading, the module, and the names in it.
API = (
    ("Attention", "api", ("attention", "attention_varlen")),
    ("Keys in pages", "api", ("attention_paged",)),
    ("Groups that share keys", "groups", ("attention_groups", "explain_groups", "GroupsPlan")),
    (
        "A sequence over many devices: `polyflash.parallel`",
        "parallel.api",
        ("attention", "attention_varlen", "split", "restore", "explain", "merge"),
    ),
    ("Masks", "mask", ("Mask",)),
    ("Partial results", "merging", ("AttentionOutput", "merge")),
    ("Statistics of weights", "statistics", ("column_sums", "row_stats", "RowStats")),
    ("Quantised keys and values", "quant.tensor", ("quantize", "dequantize", "QuantizedTensor")),
    ("Schemes", "quant.scheme", ("Scheme",)),
    ("Choosing a scheme", "quant.choosing", ("recommend_scheme", "Recommendation")),
    ("Guarding", "quant.guard", ("Guard", "ErrorBudgetExceeded")),
    ("Choice of a kernel", "api", ("explain", "use_backend")),
    ("Plans", "plan", ("Plan",)),
    ("What ran", "counting", ("counters", "watch")),
    ("Data on a WebGPU device", "webgpu", ("attention", "batch", "DeviceOutput")),
    ("Errors", "errors", ("SpecError", "UnsupportedError")),
    ("The paged cache", "kvcache.cache", ("KVCache", "SwappedRequest")),
    ("The paged cache: requests, room and prefixes", "kvcache.storage", ("Storage",)),
    ("A step of the cache", "kvcache.cache", ("Step",)),
    ("Handles", "kvcache.handles", ("Request", "Snapshot", "OutOfPages")),
    ("Plans of the cache", "kvcache.shared_prefix", ("AttendPlan",)),
    ("Rotation", "kvcache.rope", ("Rope",)),
    ("Occupancy", "kvcache.occupancy", ("CacheStats", "heavy_hitters")),
    ("Writing to pages", "kvcache.layout", ("write_tokens",)),
    ("FlashInfer's tables", "kvcache.tables", ("from_flashinfer", "to_flashinfer")),
    (
        "torch's SDPA call sites",
        "integrations.sdpa",
        ("enabled", "activate", "deactivate", "scaled_dot_product_attention"),
    ),
    (
        "flash-attn's functions",
        "integrations.flash_attn",
        ("flash_attn_func", "flash_attn_varlen_func", "unpad_input", "pad_input", "index_first_axis"),
    ),
    ("flash-attn's cache", "integrations.flash_attn_cache", ("flash_attn_with_kvcache",)),
    ("flash-attn's rotary embedding", "integrations.flash_attn_rotary", ("apply_rotary_emb",)),
    ("transformers", "integrations.transformers", ("register",)),
    ("transformers' cache in pages", "integrations.transformers_cache", ("PagedCache",)),
    ("diffusers", "integrations.diffusers", ("register", "unregister")),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def api_page() -> str:
    """Signature and docstring of every public function, read off the sources."""
    parts = []
    for heading, module, names in API:
        path = PACKAGE.joinpath(*module.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        parts.append(f"## {heading}\n\n`polyflash.{module}`\n")
        for name in names:
            node = _defined(ast.parse(source.read_text(encoding="utf-8")).body, name)
            parts.append("\n".join(("```text", *_described(node, name), "```\n")))
    return "\n".join(parts)


def _defined(body: list[ast.stmt], name: str) -> Function | ast.ClassDef:
    """The definition of `name`; of overloads the last, which has the body."""
    found = [node for node in body if isinstance(node, Function | ast.ClassDef) and node.name == name]
    if not found:
        raise SystemExit(f"scripts/tables.py: no definition of {name}. Correct API.")
    return found[-1]


def _described(node: Function | ast.ClassDef, name: str) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield f"class {name}"
    else:
        yield from _signature(node, name)
    for line in (ast.get_docstring(node) or "").splitlines():
        yield f"    {line}".rstrip()
    if isinstance(node, ast.ClassDef):
        methods = {m.name: m for m in node.body if isinstance(m, Function)}  # the last overload of each
        for method in methods.values():
            if not method.name.startswith("_") and ast.get_docstring(method):
                yield ""
                yield from (f"    {line}".rstrip() for line in _described(method, method.name))


def _signature(node: Function, name: str) -> Iterator[str]:
    """One line, or as many as it needs. Types stand in the docstring; `self` and the catch-all of misspelt
    names are left out."""
    if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
        yield f"{name}: {ast.unparse(node.returns) if node.returns else ''}"
        return
    node.args.args = [a for a in node.args.args if a.arg not in ("self", "cls")]
    if node.args.kwarg is not None and node.args.kwarg.arg == "unknown":
        node.args.kwarg = None
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    whole = f"{name}({ast.unparse(node.args)}){returns}"
    yield from textwrap.wrap(whole, WIDTH - 4, subsequent_indent=" " * 8, break_long_words=False)


def _has(row: Capability, feature: Feature) -> str:
    return "-" if feature not in row.features else "on CPUs" if feature in row.host_features else "yes"


def capability_table() -> str:
    """Markdown: every row of the table, and what each can do."""
    table = backends.TABLE
    about = [("row", "targets", "dtypes", "head_dim up to", "needs")]
    for row in table:
        targets = ", ".join(name or "any" for name in row.targets)
        dim = str(row.max_head_dim) if row.max_head_dim < 1 << 16 else "any"
        about.append((row.name, targets, ", ".join(sorted(row.dtypes)), dim, ", ".join(row.needs) or "torch"))
    features = [("feature", *map(label, table))]
    features += [(f.value, *(_has(row, f) for row in table)) for f in Feature]
    notes = [
        f"- {label(row)} leaves {', '.join(sorted(y.dtypes))} on {y.target_feature} to a lower row: {y.why}."
        for row in table
        for y in row.yields
    ]
    return "\n".join((_markdown(about), "", _markdown(features), "", *notes))


def variable_table() -> str:
    """Markdown: every environment variable."""
    ours = [("variable", "default", "what it does")]
    ours += [(f"`{v.name}`", f"`{v.default}`" if v.default else "unset", v.doc) for v in env.ALL]
    others = [("variable", "what it does")]
    others += [(f"`{v.name}`", v.doc) for v in env.OF_OTHERS]
    read = "Read by `polyflash env` and `polyflash doctor` alone, as torch's threads or Triton obey them:"
    return "\n".join((_markdown(ours), "", read, "", _markdown(others)))


REAL = DOCS.parent / "tests" / "data" / "minilm_qkv_slice.safetensors"
ERRORS, SEARCHED = (2, 64, 1024, 128), (8, 96, 256, 64)  # heads, rows, keys, head_dim
BOUNDS = (1e-2, 5e-2, 2e-1)


def _inputs(sizes: tuple[int, int, int, int]) -> dict[str, families.Triple]:
    """The six families in these sizes, and real activations."""
    from safetensors.torch import load_file

    real = load_file(REAL)
    named = {name: families.drawn(name, *sizes) for name in families.FAMILIES}
    return {**named, "real": tuple(real[f"layer3.{x}"].float() for x in "qkv")}


def quantisation_tables() -> str:
    """Markdown: what every scheme costs, and how well `recommend_scheme` chooses."""
    inputs = _inputs(ERRORS)
    lines = list(measured(inputs, causal=False))
    errors = [("scheme", "K", "V", "bits", *inputs)]
    worst = [("scheme", *inputs)]
    for name, pair in choosing.REPORTED.items():
        of_scheme = [x for x in lines if x.scheme == name]
        k, v = (f"`{text[2:]}`" for text in choosing.text_of(pair).split(", "))
        cells = [in_short(x.error.relative) for x in of_scheme]
        errors.append((f"`{name}`", k, v, f"{of_scheme[0].bits:.2f}", *cells))
        worst.append((f"`{name}`", *(in_short(x.error.worst_row) for x in of_scheme)))
    parts = ("Relative L2 of the output:", _markdown(errors), "Of its worst row:", _markdown(worst))
    return "\n\n".join((*parts, *_regrets()))


def _regrets() -> Iterator[str]:
    yield (
        "What `recommend_scheme` chooses, from all pairs of these schemes for K and for V: bits per value;"
        " how many more these are than the fewest that hold the bound on all rows and heads, by exhaustive"
        " search; the error on all rows and heads as a share of the bound."
    )
    rows = [("inputs", *(f"bound {in_short(bound)}" for bound in BOUNDS))]
    for name, (q, k, v) in _inputs(SEARCHED).items():
        rows.append((name, *(regret(q, k, v, bound) for bound in BOUNDS)))
    yield _markdown(rows)


def regret(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: float) -> str:
    """One choice against the best one: "8.25 bits, +0.00, 0.93"."""
    pairs, cost = _costs(q, k, v)
    found = recommend_scheme(q, k, v, bound)
    best = min((bits for pair, bits in pairs.items() if cost(*pair) <= bound), default=None)
    if found.scheme is None:
        return "none holds it" if best is None else f"none found, {best:.2f} hold it"
    more = "" if best is None else f", {pairs[found.scheme] - best:+.2f}"
    return f"{pairs[found.scheme]:.2f} bits{more}, {cost(*found.scheme) / bound:.2f}"


@cache
def _costs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """The pairs of schemes with their bits, and their relative L2 over all rows; each part computed once."""
    through = cache(lambda of_v, scheme: dequantize(quantize((k, v)[of_v], scheme)))
    weights = cache(lambda scheme: _weights(q, through(0, scheme)))
    exact = _weights(q, k) @ v
    cost = cache(lambda a, b: float((weights(a) @ through(1, b) - exact).norm() / exact.norm()))
    return choosing.candidates(k, v), cost


def _weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT / q.shape[3] ** 0.5).softmax(-1)


def _settled(new: str, old: str) -> str:
    """`new`, with the measured numbers of `old` that differ from it by one in their last digit at most."""
    number = re.compile(r"(?<![\w.+`-])(\d+\.(\d+))(e-\d+)?(?![\w.])")
    before = number.findall(old)
    if len(before) != len(number.findall(new)):
        return new
    were = iter(before)

    def kept(now: re.Match[str]) -> str:
        size, digits, exponent = next(were)
        last = float(f"1e-{len(digits)}") * float(f"1{exponent}")
        return size + exponent if abs(float(size + exponent) - float(now[0])) < 1.5 * last else now[0]

    return number.sub(kept, new)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join((lines[0], "|" + "---|" * len(rows[0]), *lines[1:]))


PAGES = {
    "capabilities.md": capability_table,
    "env.md": variable_table,
    "api.md": api_page,
    "quantisation.md": quantisation_tables,
}


def printed(name: str) -> str:
    """The whole page `name` as it should be."""
    above, marker, below = (DOCS / name).read_text(encoding="utf-8").partition(MARKER)
    if not marker:
        raise SystemExit(f"{name}: got no marker, wanted {MARKER!r}. Add it where the table begins.")
    made = f"\n\n{PAGES[name]().rstrip()}\n"
    return f"{above}{MARKER}{_settled(made, below) if name == 'quantisation.md' else made}"


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
