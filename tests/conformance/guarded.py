"""Drawn calls whose every operand ends, or starts, at memory that no one may touch, against a float64
reference in numpy that shares no line with the library's own.

A draw is plain data; a `Guarded` process that reads or writes one byte outside an operand dies, and
scripts/fuzz.py stores the draw it died of.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import polyflash
from tests.rows_here import HERE

ROOM = 1 << 26  # bytes of an operand, at most
PAGE = mmap.PAGESIZE
NONE, READ, WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
KINDS = ("dense", "pages", "packed", "known", "threads")
THREADS, CALLS_EACH = 8, 25
# Most of them share few kernels: what takes time is to compile one.
HEAD_DIMS = (1, 3, 8, 15, 16, 17, 24, 32, 33, 40, 63, 64, 64, 64) * 4 + (
    65,
    80,
    127,
    128,
    129,
    192,
    256,
    320,
    576,
)
LENGTHS = (0, 1, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 257, 300)
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
WAYS = ("plain",) * 3 + ("gaps", "order", "zero", "overlap", "far", "step")  # how an operand lies in memory
OPERANDS = ("q", "k", "v", "out", "mask", "bias", "other")
FAR = 2**62
libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """ROOM bytes between two pages without access."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, ROOM + 2 * PAGE)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + PAGE
        for page in (self.start - PAGE, self.start + ROOM):
            _protect(page, PAGE, NONE)

    def flat(self, count: int, dtype: torch.dtype, at_end: bool) -> Tensor:
        """`count` elements, poisoned, with poison on the side where no page stands."""
        size = max(1, count) * dtype.itemsize
        self.open(WRITE)
        beside = min(PAGE, ROOM - size)
        first = self.start + ROOM - size if at_end else self.start
        ctypes.memset(first - beside if at_end else first, 0xFF, size + beside)
        memory = (ctypes.c_char * size).from_address(first)
        return torch.frombuffer(memory, dtype=dtype, count=max(1, count))

    def open(self, how: int) -> None:
        _protect(self.start, ROOM, how)


def _protect(start: int, size: int, how: int) -> None:
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), how):
        raise OSError(ctypes.get_errno(), "mprotect")


class Place(threading.local):
    """The arenas of a thread: one per operand of a call."""

    def __init__(self) -> None:
        self.arenas: list[Arena] = []
        self.used = 0

    def next(self) -> Arena:
        if self.used == len(self.arenas):
            self.arenas.append(Arena())
        self.used += 1
        return self.arenas[self.used - 1]

    def close(self, how: int) -> None:
        """What may be done with the operands of the call that comes."""
        for arena in self.arenas[: self.used]:
            arena.open(how)


place = Place()


@dataclass(frozen=True)
class Draw:
    """`kind` is one of KINDS; `calls` are made in their order, of "threads" every eighth by the same thread.
    Each has the fields that `call_of` draws."""

    kind: str
    calls: list[dict[str, Any]] = field(default_factory=list)

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def read(text: str) -> Draw:
        return Draw(**json.loads(text))


def drawn(kind: str, seed: int) -> Draw:
    """Draw number `seed`, the same wherever it is drawn."""
    r = random.Random(f"{kind} {seed}")
    if kind == "threads":
        ways = [_sequence(r, CALLS_EACH - 1) for _ in range(THREADS)]
        calls = [call for each in zip(*ways, strict=True) for call in each]
    else:
        calls = _sequence(r, r.randint(3, 7)) if kind == "known" else [call_of(r, kind)]
    return Draw.read(Draw(kind, calls).text())  # as from a file


def _sequence(r: random.Random, more: int) -> list[dict[str, Any]]:
    """A call of few rows and calls that are mostly like it."""
    calls = [call_of(r, "pages" if r.random() < 0.4 else "known")]
    for _ in range(more):
        calls.append(changed(r, dict(calls[-1])))
    return calls


def draws(kind: str) -> Any:
    """For Hypothesis: draws by their number."""
    from hypothesis import strategies as st

    return st.integers(0, 2**40).map(lambda seed: drawn(kind, seed))


def call_of(r: random.Random, kind: str) -> dict[str, Any]:
    """One call: sizes, which operands, how each lies in memory, and a seed of its values."""
    pages = kind == "pages"
    known = kind == "known"
    group, kv_heads = r.choice((1, 1, 2, 3, 4, 5, 8)), r.choice((1, 1, 2, 3, 4))
    dim = r.choice(HEAD_DIMS)
    members = r.randint(1, 4)
    rows = r.choice((1, 1, 2, 3)) if known else 1 if pages and r.random() < 0.6 else r.choice(LENGTHS)
    packed = kind == "packed" or (pages and rows != 1)
    members = members if packed or pages else r.choice((1, 1, 2, 3, 0 if r.random() < 0.1 else 1))
    lens = [r.choice(LENGTHS) for _ in range(members)]
    longest = max(lens, default=0)
    keys = longest if packed or pages else r.choice(LENGTHS)
    while members * kv_heads * group * max(1, rows) * max(1, keys) > 2**17:
        rows, lens, keys = rows // 2, [n // 2 for n in lens], keys // 2
        kv_heads = max(1, kv_heads - 1)
    c: dict[str, Any] = {
        "form": "pages" if pages else "packed" if packed else "dense", "packed": packed,
        "rows": [r.randint(0, max(1, rows)) for _ in lens] if packed else rows, "keys": keys, "lens": lens,
        "members": members, "kv_heads": kv_heads, "group": group, "dim": dim,
        "dim_v": dim if r.random() < 0.6 else r.choice(HEAD_DIMS),
        "dtype": r.choice(("float32", "bfloat16", "float16", "float64" if not known else "float32")),
        "page": r.choice((1, 2, 3, 4, 8, 16, 64, 128)), "seed": r.getrandbits(31),
        "how": {n: (r.choice(WAYS), r.random() < 0.7) for n in OPERANDS},
        "causal": r.choice((False, False, True, True, "top_left")), "window": None, "scale": None,
        "softcap": 0.0, "sinks": False, "alibi": "", "mask": "", "bias": "", "kv_lens": pages,
        "kv_starts": False, "q_offset": None, "return_lse": r.random() < 0.5, "out": r.random() < 0.4,
        "layout": r.choice(("bhsd", "bhsd", "bshd")), "backend": r.choice((None, None, *HERE)),
        "use_backend": False, "grad": False, "threads": r.choice((1, 1, 2)), "hidden": r.random() < 0.5,
    }  # fmt: skip
    if known:
        return c
    some = lambda p: r.random() < p  # noqa: E731
    if some(0.3):
        c["window"] = [r.choice((None, 0, 1, 5, 64, 1000)), r.choice((None, 0, 1, 5, 64, 1000))]
    c["scale"] = r.choice((None, None, None, 0.0, -0.3, 0.5, 1e-30))
    c["softcap"] = r.choice((0.0, 0.0, 0.0, 0.7, 30.0))
    c["sinks"], c["alibi"] = some(0.2), r.choice(("", "", "", "h", "bh"))
    c["kv_lens"], c["kv_starts"] = pages or some(0.3), some(0.2)
    c["q_offset"] = r.choice((None,) * 5 + ("tensor", r.randint(-70, 300)))
    if c["form"] == "dense":
        c["mask"], c["bias"] = (
            r.choice(("", "", "bhqk", "b11k", "qk", "1h1k")),
            r.choice(("", "", "bhqk", "11qk", "k")),
        )
        c["grad"] = some(0.15)
    return c


def changed(r: random.Random, c: dict[str, Any]) -> dict[str, Any]:
    """The call after `c` of a sequence: mostly one more key, sometimes another dtype, layout, place, ..."""
    c["seed"] = r.getrandbits(31)
    c["how"] = {
        **c["how"],
        "q": (c["how"]["q"][0], r.random() < 0.7),
        "k": (c["how"]["k"][0], r.random() < 0.7),
    }
    c["keys"] += 1
    c["lens"] = [n + 1 for n in c["lens"]]
    c["grad"] = c["use_backend"] = False
    what = r.choice(
        ("",) * 5 + ("stride", "dtype", "grad", "out", "backend", "use_backend", "scale", "lse", "threads",
        "causal", "length", "rows", "heads", "place")
    )  # fmt: skip
    if what == "stride":
        ways = ("plain", "gaps", "order", "far", "step", "zero")
        c["how"] = {**c["how"], "k": (r.choice(ways), True), "v": (r.choice(ways), True)}
    elif what == "dtype":
        c["dtype"] = r.choice(("float32", "bfloat16", "float16"))
    elif what == "grad":
        c["grad"] = c["form"] == "dense"
    elif what == "backend":
        c["backend"] = r.choice((None, *HERE))
    elif what == "use_backend":
        c["use_backend"] = True
    elif what == "scale":
        c["scale"] = r.choice((None, 0.25, -0.5, 0.0))
    elif what == "threads":
        c["threads"] = 3 - c["threads"]
    elif what == "causal":
        c["causal"] = r.choice((False, True))
    elif what == "length":
        c["keys"] = r.choice(LENGTHS)
        c["lens"] = [r.choice(LENGTHS) for _ in c["lens"]]
    elif what == "rows" and not c["packed"]:
        c["rows"] = c["rows"] % 4 + 1 if c["form"] == "dense" else 1
    elif what == "heads":
        c["group"] = r.choice((1, 2, 8))
    elif what == "place":
        c["how"] = {n: (way, not end) for n, (way, end) in c["how"].items()}
    elif what == "lse":
        c["return_lse"] = not c["return_lse"]
    elif what == "out":
        c["out"] = not c["out"]
    if c["form"] == "pages" and not c["packed"]:
        c["keys"] = max(c["lens"], default=0)
    return c


def strides_of(shape: tuple[int, ...], way: str) -> list[int]:
    """Of the named way to lie in memory; the innermost dimension is the last but for `order` and `step`."""
    order = list(range(len(shape)))
    if way == "order" and len(shape) > 1:
        order = [*order[:-1][::-1], order[-1]]
    strides, step = [0] * len(shape), 2 if way == "step" else 1
    for d in reversed(order):
        strides[d] = step
        step = step * max(1, shape[d]) + (3 if way == "gaps" else 0)
    if way == "zero":
        strides[0] = 0
    if way == "overlap" and len(shape) > 2:
        strides[-2] = 1
    if way == "far":
        strides = [FAR if n == 1 else s for n, s in zip(shape, strides, strict=True)]
    return strides


def put(values: np.ndarray, dtype: torch.dtype, how: tuple[str, bool]) -> Tensor:
    """A tensor of these values at the edge of an arena; one that overlaps itself has some of them."""
    way, at_end = how
    strides = strides_of(values.shape, way)
    count = sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True)) + 1 if values.size else 0
    flat = place.next().flat(count, dtype, at_end)
    x = flat[: max(count, 0)].as_strided(values.shape, strides) if count else flat[:0].view(values.shape)
    if values.size and (0 in strides or way == "overlap"):
        given = torch.from_numpy(np.resize(values, count)).to(dtype)
        flat.copy_(given)
    elif values.size:
        x.copy_(torch.from_numpy(values))
    return x


def check(draw: Draw) -> None:
    """Makes the calls of a draw. A call that leaves its operands ends the process."""
    before = torch.get_num_threads()
    try:
        if draw.kind != "threads":
            return make_all(draw.calls)
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(make_all, [draw.calls[n::THREADS] for n in range(THREADS)]))
    finally:
        torch.set_num_threads(before)


def make_all(calls: list[dict[str, Any]]) -> None:
    for number, call in enumerate(calls):
        try:
            check_one(call)
        except Exception as error:
            raise AssertionError(f"call {number}: {type(error).__name__}: {error}: {call}") from error


def replay(path: Path) -> None:
    check(Draw.read(path.read_text(encoding="utf-8")))


@dataclass
class Made:
    """The operands of a call: as the function takes them, and what the reference needs of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    lens: list[int] | None = None
    starts: list[int] | None = None
    offsets: list[int] | None = None
    table: np.ndarray | None = None
    bounds_q: list[int] | None = None
    bounds_k: list[int] | None = None


def made(c: dict[str, Any]) -> Made:
    g = np.random.default_rng(c["seed"])
    dtype = getattr(torch, c["dtype"])
    how = {n: tuple(x) for n, x in c["how"].items()}
    heads, members = c["kv_heads"] * c["group"], c["members"]
    pages, packed = c["form"] == "pages", c["packed"]
    total_q = sum(c["rows"]) if packed else c["rows"]
    pool = 0
    if pages:
        columns = max((-(-n // c["page"]) for n in c["lens"]), default=0) + int(g.integers(0, 2))
        pool = max(1, members * columns)
        k_shape: tuple[int, ...] = (pool, c["page"], c["kv_heads"])
        q_shape: tuple[int, ...] = (total_q if packed else members, heads)
    elif packed:
        k_shape, q_shape = (
            (sum(c["lens"]) + int(g.integers(0, 3)), c["kv_heads"]),
            (total_q + int(g.integers(0, 3)), heads),
        )
    else:
        k_shape, q_shape = (members, c["kv_heads"], c["keys"]), (members, heads, c["rows"])
        if c["layout"] == "bshd":
            k_shape, q_shape = (members, c["keys"], c["kv_heads"]), (members, c["rows"], heads)
    normal = lambda *shape: g.standard_normal(shape)  # noqa: E731
    q = put(normal(*q_shape, c["dim"]), dtype, how["q"])
    k = put(normal(*k_shape, c["dim"]), dtype, how["k"])
    v = put(normal(*k_shape, c["dim_v"]), dtype, how["v"])
    made = Made(q, k, v, {})
    o, other = made.options, how["other"]
    ints = lambda values: put(np.array(values, dtype=np.int32), torch.int32, ("plain", other[1]))  # noqa: E731
    limits = c["lens"] if pages or packed else [c["keys"]] * members
    if c["kv_lens"]:
        made.lens = list(c["lens"]) if pages else [int(g.integers(0, n + 1)) for n in limits]
        o["kv_lens"] = ints(made.lens)
    if c["kv_starts"]:
        made.starts = [int(g.integers(0, n + 1)) for n in limits]
        o["kv_starts"] = ints(made.starts)
    if c["q_offset"] == "tensor":
        made.offsets = [int(g.integers(-70, 300)) for _ in limits]
        o["q_offset"] = ints(made.offsets)
    elif c["q_offset"] is not None:
        made.offsets = [c["q_offset"]] * members
        o["q_offset"] = c["q_offset"]
    if packed:
        made.bounds_q = [0, *np.cumsum(c["rows"]).tolist()]
        o["cu_seqlens_q"] = ints(made.bounds_q)
    if packed and not pages:
        made.bounds_k = [0, *np.cumsum(c["lens"]).tolist()]
        o["cu_seqlens_k"] = ints(made.bounds_k)
    if pages:
        made.table = g.permutation(pool)[: members * columns].reshape(members, columns).astype(np.int32)
        o["page_table"] = put(
            made.table, torch.int32, (other[0] if other[0] in ("gaps", "far") else "plain", other[1])
        )
    if c["window"]:
        o["window"] = tuple(c["window"])
    if c["alibi"]:
        o["alibi_slopes"] = put(
            normal(*((members,) if c["alibi"] == "bh" else ()), heads), torch.float32, ("plain", other[1])
        )
    if c["sinks"]:
        o["sinks"] = put(normal(heads), torch.float32, ("plain", other[1]))
    sizes = {"b": members, "h": heads, "q": c["rows"], "k": c["keys"]}
    for name in ("mask", "bias"):
        if c[name]:
            shape = tuple(sizes.get(letter, 1) for letter in c[name])
            values = normal(*shape) if name == "bias" else g.random(shape) < 0.7
            o[name] = put(values, torch.float32 if name == "bias" else torch.bool, how[name])
    for name in ("scale", "causal", "backend"):
        if c[name] is not None and not (name == "backend" and c["use_backend"]):
            o[name] = c[name]
    if c["softcap"]:
        o["softcap"] = c["softcap"]
    if c["form"] == "dense" and c["layout"] == "bshd":
        o["layout"] = "bshd"
    return made


def function_of(c: dict[str, Any]) -> Any:
    return {
        "dense": polyflash.attention,
        "packed": polyflash.attention_varlen,
        "pages": polyflash.attention_paged,
    }[c["form"]]


def check_one(c: dict[str, Any]) -> None:
    torch.set_num_threads(c["threads"])
    place.used = 0
    m = made(c)
    poison()
    inputs = place.used
    shape = (*m.q.shape[:-1], c["dim_v"])
    options: dict[str, Any] = {**m.options, "return_lse": c["return_lse"]}
    given = [m.q, m.k, m.v]
    if c["grad"]:
        given = [x.requires_grad_() for x in given]
    elif c["out"]:
        way, at_end = c["how"]["out"]
        way = way if way in ("plain", "gaps", "order", "far", "step") else "plain"
        options["out"] = put(np.full(shape, np.nan), m.q.dtype, (way, at_end))
    for arena in place.arenas[:inputs]:
        arena.open(READ)
    context = polyflash.use_backend(c["backend"]) if c["use_backend"] else contextlib.nullcontext()
    try:
        with context, contextlib.nullcontext() if c["grad"] else torch.no_grad():
            found = function_of(c)(*given, **options)
            out, lse = (found.out, found.lse) if c["return_lse"] else (found, None)
            if c["grad"] and out.requires_grad:
                check_gradients(given, out)
    except polyflash.UnsupportedError:
        if c["backend"] is None:
            raise
        return
    finally:
        place.close(WRITE)
    assert tuple(out.shape) == shape and out.dtype is m.q.dtype, "shape or dtype"
    assert "out" not in options or out is options["out"], "out is another tensor"
    compare(c, m, out.detach(), lse if lse is None else lse.detach())


def check_gradients(given: list[Tensor], out: Tensor) -> None:
    """They exist and are finite where the operands are; values are the business of another target."""
    gradients = torch.autograd.grad(out.sum(), given)
    for x, dx in zip(given, gradients, strict=True):
        assert dx.shape == x.shape and bool(dx.isfinite().all()), "gradients"


def poison() -> None:
    """Scratch that calls keep holds NaN."""
    try:
        from polyflash.backends.cpu import decode, pool
    except ImportError:
        return
    for memory in (pool._caller.scratch, decode._kept.partials):
        if memory is not None:
            ctypes.memset(memory.address, 0xFF, memory.size)


def compare(c: dict[str, Any], m: Made, out: Tensor, lse: Tensor | None) -> None:
    q, k, v, got = (x.detach().to(torch.float64).numpy() for x in (m.q, m.k, m.v, out))
    mask, bias = (m.options.get(n) for n in ("mask", "bias"))
    if c["form"] == "dense":
        if c["layout"] == "bshd":
            q, k, v, got = (x.swapaxes(1, 2) for x in (q, k, v, got))
        full = (c["members"], c["kv_heads"] * c["group"], c["rows"], c["keys"])
        seen = None if mask is None else np.broadcast_to(mask.numpy(), full)
        added = None if bias is None else np.broadcast_to(bias.double().numpy(), full)
        for b in range(c["members"]):
            one(c, m, b, q[b], k[b], v[b], got[b], None if lse is None else lse[b],
                None if seen is None else seen[b], None if added is None else added[b])  # fmt: skip
        return
    for b in range(c["members"]):
        if c["form"] == "pages":
            n = c["lens"][b]
            at = m.table[b][np.arange(n) // c["page"]], np.arange(n) % c["page"]
            keys, values = k[at].swapaxes(0, 1), v[at].swapaxes(0, 1)
        else:
            own = slice(m.bounds_k[b], m.bounds_k[b + 1])
            keys, values = k[own].swapaxes(0, 1), v[own].swapaxes(0, 1)
        rows = slice(m.bounds_q[b], m.bounds_q[b + 1]) if c["packed"] else slice(b, b + 1)
        part = None if lse is None else lse[:, rows]
        one(c, m, b, q[rows].swapaxes(0, 1), keys, values, got[rows].swapaxes(0, 1), part, None, None)
    if c["packed"]:
        rest = slice(m.bounds_q[-1], None)
        assert (got[rest] == 0).all() and (lse is None or bool((lse[:, rest] == -math.inf).all())), (
            "rows beyond"
        )


@np.errstate(invalid="ignore")  # of -inf less -inf
def one(
    c: dict[str, Any], m: Made, b: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray,
    lse: Tensor | None, seen: np.ndarray | None, bias: np.ndarray | None,
) -> None:  # fmt: skip
    """One request: q (heads, rows, dim), k and v (kv heads, keys, dim), against float64 in numpy."""
    heads, rows, dim = q.shape
    keys = k.shape[1]
    live = keys if m.lens is None else m.lens[b]
    start = 0 if m.starts is None else m.starts[b]
    offset = live - rows
    if m.offsets is not None:
        offset = m.offsets[b]
    elif c["causal"] == "top_left":
        offset = 0
    i, j = np.arange(rows)[:, None] + offset, np.arange(keys)[None]
    visible = (j >= start) & (j < live) & np.ones((rows, 1), bool)
    if c["causal"]:
        visible = visible & (j <= i)
    left, right = c["window"] or (None, None)
    if left is not None:
        visible = visible & (j >= i - left)
    if right is not None:
        visible = visible & (j <= i + right)
    scale = dim**-0.5 if c["scale"] is None else c["scale"]
    slopes = m.options.get("alibi_slopes")
    eps = EPS[c["dtype"]]
    small = 2.0**-20 if c["dtype"] != "float64" else 2.0**-46
    for h in range(heads):
        group = h // c["group"]
        s = scale * (q[h] @ k[group].T)
        size = abs(scale) * (np.abs(q[h]) @ np.abs(k[group]).T)
        if c["softcap"]:
            s = c["softcap"] * np.tanh(s / c["softcap"])
        if bias is not None:
            s, size = s + bias[h], size + np.abs(bias[h])
        if slopes is not None:
            slope = float(slopes[h] if slopes.ndim == 1 else slopes[b, h])
            s, size = s - slope * np.abs(i - j), size + abs(slope) * np.abs(i - j)
        here = visible if seen is None else visible & seen[h]
        s = np.where(here, s, -np.inf)
        sink = -np.inf if not c["sinks"] else float(m.options["sinks"][h])
        top = np.maximum(s.max(1, initial=-np.inf), sink)[:, None]
        p = np.where(here, np.exp(s - np.where(np.isfinite(top), top, 0)), 0.0)
        total = p.sum(1, keepdims=True) + np.where(np.isfinite(top), np.exp(sink - top), 0)
        p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
        want, spread = p @ v[group], p @ np.abs(v[group])
        wobble = np.where(here, size, 0).max(1, initial=0.0)[:, None]
        allowed = spread * (3 * eps + 4 * small * (1 + wobble)) + 2.0**-24 * (c["dtype"] == "float16") + 1e-30
        wrong = ~(np.abs(out[h] - want) <= allowed)
        assert not wrong.any(), (
            f"out of request {b}, head {h}, row and channel {np.argwhere(wrong)[0].tolist()}"
        )
        assert (out[h][~here.any(1)] == 0).all(), f"request {b}: a row without keys is not 0"
        if lse is not None:
            right_lse = np.where(total > 0, np.log(np.where(total > 0, total, 1)) + top, -np.inf)[:, 0]
            near = np.abs(lse[h].double().numpy() - right_lse) <= 4 * small * (
                1 + wobble[:, 0] + np.abs(right_lse)
            )
            assert (near | (lse[h].double().numpy() == right_lse)).all(), f"lse of request {b}, head {h}"
