"""Drawn problems (testing method §3.9) and what each must hold: for the suite, the fuzzer and stored draws.

A draw is plain data: strategies make it, `check()` runs it on every row that accepts it, and its JSON form in
tests/data/draws is replayed by the suite.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from polyflash.workloads import Workload
from tests.conformance.gradients import (
    BACKWARD,
    NAMED,
    check_identities,
    cotangents,
    gradients,
    hold,
    refusal,
)
from tests.conformance.pages import contiguous
from tests.conformance.rows import HEAD_DIMS, STEPS, Runner
from tests.families import make
from tests.tolerance import check, expect, near, relative_l2

STORED = Path(__file__).resolve().parent.parent / "data" / "draws"
ORACLE_FITS = 2**18  # scores; above, gradients are held to the identities alone
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 3, 11, 53, 101, 199, 509, 1097)
FAMILIES = (
    "normal", "x4", "x10", "kbias", "qkbias", "kscale", "sparse", "sharp", "vbias", "sink", "rising",
    "falling",
    "equal", "zeros", "onehot", "alternating", "nanrow",
)  # fmt: skip
LAYOUTS = ("bhsd", "bshd", "packed", "stride 2", "offset", "reversed order")


@dataclass(frozen=True)
class Draw:
    """One problem. `layout` and `dout_layout` name how operands and dout lie in memory, unless packed;
    `needs` are the operands that get gradients."""

    kind: str  # "forward" or "gradients"
    workload: Workload
    family: str = "normal"
    layout: str = "bhsd"
    seed: int = 0
    dout_layout: str = "bhsd"
    needs: tuple[str, ...] = NAMED
    dlse: bool = False
    dropout_p: float = 0.0

    def text(self) -> str:
        """As JSON."""
        plain = dataclasses.asdict(self)
        plain["workload"]["tags"] = []
        return json.dumps(plain, indent=1) + "\n"

    @staticmethod
    def read(text: str) -> Draw:
        plain = {n: _tuples(x) for n, x in json.loads(text).items() if n != "workload"}
        fields = {n: _tuples(x) for n, x in json.loads(text)["workload"].items()}
        return Draw(workload=Workload(**{**fields, "tags": frozenset()}), **plain)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        w, family = self.workload, self.family
        if w.page_size and self.dropout_p:
            return replace(self, dropout_p=0.0).tensors()
        if 0 in (w.batch, w.seqlen_k, w.seqlen_q) and family != "nanrow":
            family = "normal"
        q, k, v, options = make(w, seed=self.seed, family=family)
        if self.dropout_p:
            options |= {"dropout_p": self.dropout_p, "dropout_seed": self.seed}
        return q, k, v, options


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def check_draw(draw: Draw) -> None:
    {"forward": check_forward, "gradients": check_gradients}[draw.kind](draw)


def replay(path: Path) -> None:
    """Checks a stored draw."""
    check_draw(Draw.read(path.read_text(encoding="utf-8")))


@st.composite
def forward_draws(draw: st.DrawFn, source: Any) -> Draw:
    workload, family, layout, seed = draw(source)
    return Draw(
        "forward", workload, family, layout, seed, dropout_p=draw(st.sampled_from((0.0,) * 7 + (0.3,)))
    )


@st.composite
def gradient_draws(draw: st.DrawFn) -> Draw:
    """The same problems, any subset of operands that needs gradients, dout of any layout."""
    workload, family, layout, seed = draw(
        st.one_of(problems(), problems(), listed_problems(), packed_problems())
    )
    present = ["q", "k", "v", *(["bias"] if workload.bias else []), *(["sinks"] if workload.sinks else [])]
    subset = st.lists(st.sampled_from(present), min_size=1, unique=True)
    needs = draw(st.one_of(st.just(present), st.just(present), subset))
    return Draw(
        "gradients",
        workload,
        "normal" if family == "nanrow" else family,
        layout,
        seed,
        draw(st.sampled_from((*LAYOUTS, "expanded"))),
        tuple(name for name in NAMED if name in needs),
        draw(st.booleans()),
        draw(st.sampled_from((0.0,) * 5 + (0.3,))),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Workload, str, str, int]:
    """A workload, an input family, a storage layout and a seed."""
    batch, kv_heads = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    group = draw(st.sampled_from((1, 2, 3, 5, 7, 8)))
    rows, keys = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    if batch * kv_heads * group * rows * keys > 2**20:
        batch, kv_heads = min(batch, 1), 1
    sides = st.none() | st.integers(0, keys + 2)
    lens = st.tuples(*(st.integers(0, keys) for _ in range(batch)))
    kind = draw(
        st.sampled_from(
            ("none", "causal", "window", "both", "lens", "mask", "offset", "bias", "all", "lists")
        )
    )
    some = lambda *kinds: kind in kinds  # noqa: E731
    workload = Workload(
        "drawn",
        frozenset(),
        batch,
        kv_heads * group,
        kv_heads,
        rows,
        keys,
        draw(st.sampled_from(HEAD_DIMS)),
        draw(st.sampled_from((0, *HEAD_DIMS))),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16", "float64"))),
        causal=draw(st.sampled_from((True, "top_left")))
        if some("causal", "both", "offset", "all")
        else False,
        window=draw(st.tuples(sides, sides)) if some("window", "both", "all") else None,
        offset=draw(st.integers(-rows - 3, keys + 3)) if some("offset") else None,
        kv_lens=draw(lens) if some("lens", "all") else None,
        kv_starts=draw(lens) if some("lens", "all") and draw(st.booleans()) else None,
        mask=draw(st.sampled_from(("bhqk", "b11k", "qk", "1h1k", "b1q1", "k")))
        if some("mask", "all")
        else "",
        bias=draw(st.sampled_from(("bhqk", "b11k", "qk", "1h11"))) if some("bias") else "",
        softcap=draw(st.sampled_from((0.0, 4.0))) if some("bias") else 0.0,
        sinks=draw(st.booleans()) if some("bias") else False,
        alibi=draw(st.sampled_from(("", "h", "bh"))) if some("bias") else "",
        scale=draw(st.sampled_from((None, None, 0.0, -0.2, 0.5))),
    )
    return (
        workload,
        draw(st.sampled_from(FAMILIES)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.integers(0, 2**16)),
    )


@st.composite
def listed_problems(draw: st.DrawFn) -> tuple[Workload, str, str, int]:
    """A drawn problem with interval lists in the place of its bool mask."""
    workload, family, layout, seed = draw(problems())
    form = draw(st.sampled_from(("r", "br", "b1r", "1hr", "bhr")))
    form = form[:1].replace("b", "1") + form[1:] if workload.batch == 0 else form
    rows = draw(st.sampled_from((1, 7, 16, 64, 100)))
    return replace(workload, mask="", intervals=form, interval_rows=rows), family, layout, seed


@st.composite
def packed_problems(draw: st.DrawFn) -> tuple[Workload, str, str, int]:
    """A packed workload, zero members and zero lengths among them, as `problems()`."""
    lengths = st.sampled_from((0, 0, 1, 1, 2, 15, 16, 17, 31, 33, 64, 65, 129, 3, 53, 199))
    members = tuple(draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=6)))
    kv_heads = draw(st.integers(1, 3))
    rows, keys = (sum(n) + draw(st.sampled_from((0, 0, 3, 70))) for n in zip(*members, strict=True))
    sides = st.none() | st.integers(0, 130)
    kind = draw(st.sampled_from(("none", "causal", "window", "both", "lens", "offset", "rest", "all")))
    lens = st.tuples(*(st.integers(0, n) for _, n in members))
    some = lambda *kinds: kind in (*kinds, "all")  # noqa: E731
    workload = Workload(
        "drawn", frozenset(), 1, kv_heads * draw(st.sampled_from((1, 2, 3, 5, 8))), kv_heads, rows, keys,
        draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from((0, *HEAD_DIMS))), members=members,
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16", "float64"))),
        causal=draw(st.sampled_from((True, "top_left"))) if some("causal", "both", "offset") else False,
        window=draw(st.tuples(sides, sides)) if some("window", "both") else None,
        offset=draw(st.integers(-70, 140)) if kind == "offset" else None,
        kv_lens=draw(lens) if some("lens") else None,
        kv_starts=draw(lens) if some("lens") and draw(st.booleans()) else None,
        softcap=draw(st.sampled_from((0.0, 4.0))) if kind == "rest" else 0.0,
        sinks=draw(st.booleans()) if kind == "rest" else False,
        alibi=draw(st.sampled_from(("", "h", "bh"))) if kind == "rest" else "",
        scale=draw(st.sampled_from((None, None, 0.0, -0.2, 0.5))),
    )  # fmt: skip
    return workload, draw(st.sampled_from(FAMILIES)), "bhsd", draw(st.integers(0, 2**16))


@st.composite
def paged_problems(draw: st.DrawFn) -> tuple[Workload, str, str, int]:
    """A workload over pages, one token per request or mixed members, as `problems()`."""
    lengths = st.sampled_from((0, 1, 1, 2, 15, 16, 17, 31, 33, 64, 65, 129, 3, 53, 199, 257, 1025))
    mixed, kv_heads = draw(st.booleans()), draw(st.integers(1, 3))
    rows = st.sampled_from((0, 1, 1, 1, 2, 5, 16, 17, 65)) if mixed else st.just(1)
    members = tuple(draw(st.lists(st.tuples(rows, lengths), min_size=1, max_size=5)))
    count, lens = len(members), tuple(n for _, n in members)
    starts = st.tuples(*(st.integers(0, n) for n in lens))
    sides = st.none() | st.integers(0, 130)
    kind = draw(st.sampled_from(("none", "causal", "window", "starts", "offset", "rest", "all")))
    some = lambda *kinds: kind in (*kinds, "all")  # noqa: E731
    workload = Workload(
        "drawn", frozenset(), 1 if mixed else count, kv_heads * draw(st.sampled_from((1, 2, 3, 5, 8))),
        kv_heads, sum(n for n, _ in members) + draw(st.sampled_from((0, 3))) if mixed else 1,
        max(1, *lens), draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from((0, *HEAD_DIMS))),
        members=members if mixed else (), kv_lens=None if mixed else lens,
        page_size=draw(st.sampled_from((1, 3, 16, 64, 128, 256))),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16", "float64"))),
        causal=draw(st.sampled_from((True, "top_left"))) if some("causal", "window", "offset") else False,
        window=draw(st.tuples(sides, sides)) if some("window") else None,
        offset=draw(st.integers(-70, 140)) if kind == "offset" else None,
        kv_starts=draw(starts) if some("starts") else None,
        softcap=draw(st.sampled_from((0.0, 4.0))) if kind == "rest" else 0.0,
        sinks=draw(st.booleans()) if kind == "rest" else False,
        alibi=draw(st.sampled_from(("", "h", "bh"))) if kind == "rest" else "",
        scale=draw(st.sampled_from((None, None, 0.0, -0.2, 0.5))),
    )  # fmt: skip
    return workload, draw(st.sampled_from(FAMILIES)), "bhsd", draw(st.integers(0, 2**16))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, stored otherwise; always (batch, heads, seqlen, head_dim)."""
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        return torch.stack((x, x * 0 + 7, x), 3)[..., 2, :]
    if layout == "stride 2":
        return torch.stack((x, torch.full_like(x, 5)), -1)[..., 0]
    if layout == "offset":
        buffer = torch.zeros(x.numel() + 7, dtype=x.dtype)
        return buffer[7:].view(x.shape).copy_(x)
    if layout == "reversed order":
        return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    return x


def check_forward(draw: Draw) -> None:
    """Every row that accepts the problem, against the oracle and pairwise (M31)."""
    q, k, v, options = draw.tensors()
    w = draw.workload
    views = (q, k, v) if w.members or w.page_size else tuple(laid_out(x, draw.layout) for x in (q, k, v))
    flat = contiguous(q, k, v, options) if w.page_size else (q, k, v, options)
    want = None
    results: list[tuple[str, Tensor]] = []
    for row in STEPS:
        run = Runner(row)
        if run.reasons(q, k, v, **options):
            continue
        out, lse = run(*views, **options)
        want = want or expect(*flat[:3], **flat[3])
        lse = lse.contiguous() if w.page_size else lse
        check(out, lse, want, label=f"{row.name} {draw}", options=options)
        results.append((row.name, out))
    assert results, f"no row runs {draw}"
    for name, out in results[1:]:
        own = sum(relative_l2(_finite(x), _finite(want.out)) for x in (out, results[0][1]))
        label = f"M31 {name} and {results[0][0]}: {draw}"
        near(out, results[0][1], 2 * own + torch.finfo(out.dtype).eps, label)


def _finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, 0)


def check_gradients(draw: Draw) -> None:
    """Every backward row that accepts the problem: the relative rule where the oracle fits, G1 to G4, and G6
    with G8 on dout of some rows, doubled."""
    w = draw.workload
    q, k, v, options = draw.tensors()
    dout, dlse = cotangents(q, v, seed=draw.seed, packed=bool(w.members), dlse=draw.dlse)
    views = [q, k, v, dout]
    if not w.members:
        if draw.dout_layout == "expanded" and dout.numel():
            dout = dout[:, :, :1].expand_as(dout)
        views = [laid_out(x, draw.layout) for x in (q, k, v)] + [laid_out(dout, draw.dout_layout)]
    elif draw.dout_layout == "expanded":
        views[3] = dout = dout[:, :1].expand_as(dout)
    ran = 0
    for row in BACKWARD:
        backend, label = row.backend, f"{row.backend} {draw}"
        if refusal(q, k, v, backend=backend, **options):
            continue
        how: dict[str, Any] = {"backend": backend, "needs": draw.needs, "as_given": True, **options}
        got = gradients(*views, dlse, **how)
        if w.batch * w.heads * w.seqlen_q * w.seqlen_k <= ORACLE_FITS:
            hold(got, q, k, v, dout, dlse, options, label)
        check_identities(got, q, k, v, dout, dlse, options, label)
        if "q" in got:
            check_rows_apart(got["q"], views, dout, dlse, how, bool(w.members), label)
        ran += 1
    assert ran, f"no row has gradients for {draw}"


def check_rows_apart(
    dq: Tensor,
    views: list[Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    how: dict[str, Any],
    packed: bool,
    label: str,
) -> None:
    """G6, G8: dout and dlse of every third row twice as large, of the others 0: so are dQ."""
    at = torch.arange(dout.shape[0 if packed else 2]) % 3 == 1
    rows = at[:, None, None] if packed else at[:, None]
    other = torch.where(rows, 2 * dout, 0)
    other_lse = None if dlse is None else torch.where(at, 2 * dlse, 0)
    part = gradients(*views[:3], other, other_lse, **{**how, "needs": ("q",)})["q"]
    axis = 0 if packed else 2
    doubled, once = (x.index_select(axis, at.nonzero().flatten()) for x in (part, dq))
    # What is not normal, there or in a product before it, does not double exactly.
    off, least = (doubled - 2 * once).abs(), torch.finfo(dq.dtype).smallest_normal
    allowed = 2e-3 * doubled.abs() + least if dq.dtype is torch.float16 else torch.full_like(off, least)
    assert (off <= allowed).all(), f"{label}: G6, G8"
    assert (part.index_select(axis, (~at).nonzero().flatten()) == 0).all(), f"{label}: G8"
