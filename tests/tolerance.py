"""How close is close enough: the relative rule, absolute backstops and the LSE rule.

    R    = the float64 oracle                                T    = eager ops in the storage dtype, scale
    moved to K
    u    = 2·max|((R.to(dt) + 0.3) - 0.3) - R.to(dt)|        one rounding unit at output magnitude, at
    least that of max|R|: the first form is a sample of roundings, and of a few values it can be 0 by chance.
    Of many it is about as large, so that only tiny problems are held less tightly, where T's own error is a
    single draw too
    E(x) = max|x - R|     A(x) = mean|x - R|                 W(x) = max_i |x_i - R_i| / (|R_i| +
    1e-3·max_i|R_i|), row norms
    pass iff  E ≤ r·E(T) + u   and   A ≤ 1.5·A(T) + u/8   and   W ≤ 4·W(T) + 8·eps(dt)

The maximum alone is blind to a whole wrong row of small values, hence the mean and the row rule. NaN and
infinity
must be in the same places before anything is compared, and every test is written `err <= tol`, which NaN
fails.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyflash.reference import attention_reference, dropout_keep
from tests import device
from tests.references import varlen_reference

# Relative L2 of the output on normal inputs at head_dim 64 to 128: a bad T cannot loosen the test beyond
# these.
BACKSTOP = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
FEW_ROWS = 64  # below, the mean is a few correlated draws and is not held; maximum and rows are
# So few rows may have one score that decides everything, and its rounding hangs on the order of its sum: T is
# then the worst of some more orders.
SHUFFLES = 4
GRADIENT_BACKSTOP = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def bhsd(x: Tensor, layout: str) -> Tensor:
    return x.transpose(1, 2) if layout == "bshd" else x


def visible(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool | str = False,
    window: Any = None,
    mask: Any = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    q_offset: Any = None,
    **_: Any,
) -> Tensor:
    """Which key each row may see, structurally: bool (batch, num_q_heads, seqlen_q, seqlen_k), from api.md's
    table."""
    batch, heads, seqlen_q, seqlen_k = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    seen = torch.ones(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    if isinstance(mask, Tensor):
        seen = seen & mask
    elif mask is not None:
        causal = causal or mask.alignment or False
        window = _inner(window, mask.window_sides)
        kv_lens = kv_lens if mask.kv_lens is None else mask.kv_lens
        kv_starts = kv_starts if mask.kv_starts is None else mask.kv_starts
        if mask.q_ids is not None:
            seen = seen & (mask.q_ids[:, None, :, None] == mask.k_ids[:, None, None, :])
        if mask.bounds is not None:
            seen = seen & listed(mask.bounds, mask.rows, seqlen_q, seqlen_k)
    keys = torch.arange(seqlen_k)
    live = torch.full((batch, 1, 1, 1), seqlen_k) if kv_lens is None else kv_lens.long().view(-1, 1, 1, 1)
    seen = seen & (keys < live)
    if kv_starts is not None:
        seen = seen & (keys >= kv_starts.view(-1, 1, 1, 1))
    at = positions(seqlen_q, live, causal, q_offset)
    if causal:
        seen = seen & (keys <= at)
    left, right = window or (None, None)
    if left is not None:
        seen = seen & (keys >= at - left)
    if right is not None:
        seen = seen & (keys <= at + right)
    return seen


def listed(bounds: Tensor, rows: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Interval lists written out row by row: bool (batch or 1, heads or 1, seqlen_q, seqlen_k)."""
    seen = torch.zeros(*bounds.shape[:2], seqlen_q, seqlen_k, dtype=torch.bool)
    for b in range(bounds.shape[0]):
        for h in range(bounds.shape[1]):
            for block, pairs in enumerate(bounds[b, h].tolist()):
                for start, end in pairs:
                    seen[b, h, block * rows : (block + 1) * rows, start:end] = True
    return seen


def members(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> list[tuple[slice, slice, Any]]:
    """Of packed q, k, v: each member's rows, keys, and (q, k, v, options) as an unpacked call has them."""
    options = dict(options)
    rows, keys = options.pop("cu_seqlens_q").tolist(), options.pop("cu_seqlens_k").tolist()
    for name in ("max_seqlen_q", "max_seqlen_k"):
        options.pop(name, None)
    found = []
    for b in range(len(rows) - 1):
        own = dict(options)
        for name in ("kv_lens", "kv_starts", "q_offset"):
            if isinstance(own.get(name), Tensor):
                own[name] = own[name][b : b + 1]
        if own.get("alibi_slopes") is not None and own["alibi_slopes"].ndim == 2:
            own["alibi_slopes"] = own["alibi_slopes"][b : b + 1]
        if own.get("dropout_p"):
            own["first_batch"] = b
        at, of = slice(rows[b], rows[b + 1]), slice(keys[b], keys[b + 1])
        one = (x[part].transpose(0, 1)[None] for x, part in ((q, at), (k, of), (v, of)))
        found.append((at, of, (*one, own)))
    return found


def positions(seqlen_q: int, live: Tensor, causal: bool | str, q_offset: Any) -> Tensor:
    """Where each query row stands among the keys: int (batch or 1, 1, seqlen_q, 1)."""
    rows = torch.arange(seqlen_q).view(1, 1, -1, 1)
    if q_offset is not None:
        return rows + (q_offset.long().view(-1, 1, 1, 1) if isinstance(q_offset, Tensor) else q_offset)
    return rows if causal == "top_left" else rows + live - seqlen_q


def eager(q: Tensor, k: Tensor, v: Tensor, *, order: str = "", **options: Any) -> tuple[Tensor, Tensor]:
    """T: attention by eager ops, scores and probabilities rounded to the storage dtype. Layout bhsd.
    Differentiable.

    `order` "chain" gives BLAS enough rows that it runs one chain of products per sum, as it does for longer
    inputs,
    scales the sums and divides last; "turned" sums channels and keys from the other end.
    """
    v = v.repeat_interleave(q.shape[1] // max(1, k.shape[1]), 1)
    s = masked_scores(q, k, order, options)
    if options.get("sinks") is not None:
        sinks = options["sinks"].to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat((s, sinks), -1)
    lse = torch.logsumexp(s if s.dtype is torch.float64 else s.float(), -1)
    empty = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0)
    if order == "chain":
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s.sum(-1, keepdim=True)
        p = torch.exp(s - top).masked_fill(empty, 0)
        total = _product(p, p.new_ones(p.shape[-1], 1))
        return _product(dropped(p[..., : k.shape[2]], options), v) / torch.where(empty, 1, total), lse
    p = dropped(torch.softmax(s, -1).masked_fill(empty, 0)[..., : k.shape[2]], options)
    return _product(p.flip(-1), v.flip(-2)) if order else p @ v, lse


def masked_scores(q: Tensor, k: Tensor, order: str, options: dict[str, Any]) -> Tensor:
    """Scores in the dtype of q, everything but sinks applied, -inf where invisible."""
    k = k.repeat_interleave(q.shape[1] // max(1, k.shape[1]), 1)
    scale = options.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if order == "turned":
        s = _product(q.flip(-1), (k * scale).flip(-1).mT)
    else:
        s = _product(q, k.mT) * scale if order else q @ (k * scale).mT
    if options.get("softcap"):
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if options.get("bias") is not None:
        s = s + options["bias"].to(s.dtype)
    if options.get("alibi_slopes") is not None:
        s = s + _alibi(q, k, options).to(s.dtype)
    return s.masked_fill(~visible(q, k, **options), -math.inf)


def dropped(p: Tensor, options: dict[str, Any]) -> Tensor:
    """Weights, or what is like them, with those dropped that `dropout_p` and `dropout_seed` drop."""
    rate = options.get("dropout_p")
    if not rate:
        return p
    keep = dropout_keep(tuple(p.shape), rate, int(options["dropout_seed"]), options.get("first_batch", 0))
    return torch.where(torch.from_numpy(keep), p / (1.0 - rate), 0.0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with at least 64 rows and columns: fewer take another path in BLAS, which sums by vectors and has
    smaller errors. With 3 keys T would promise what one chain of products cannot hold."""
    rows, columns = a.shape[-2], b.shape[-1]
    a = torch.nn.functional.pad(a, (0, 0, 0, max(0, 64 - rows)))
    b = torch.nn.functional.pad(b, (0, max(0, 64 - columns)))
    return (a @ b)[..., :rows, :columns]


def _alibi(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    slopes = options["alibi_slopes"].double()
    lens = options.get("kv_lens")
    live = torch.full((q.shape[0], 1, 1, 1), k.shape[2]) if lens is None else lens.long().view(-1, 1, 1, 1)
    at = positions(q.shape[2], live, options.get("causal", False), options.get("q_offset"))
    slopes = slopes.view(1, -1, 1, 1) if slopes.ndim == 1 else slopes[:, :, None, None]
    return -slopes * (at - torch.arange(k.shape[2])).abs()


def _inner(a: Any, b: Any) -> tuple[int | None, int | None]:
    a = a or (None, None)
    return tuple(y if x is None else x if y is None else min(x, y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Expected:
    """What an answer is compared with: the oracle in float64, and T in the storage dtype, as (out, lse) of
    each order
    of summation. float32 has three, of few rows more: one order of one problem says little about rounding
    when only sums are rounded."""

    out: Tensor
    lse: Tensor
    eager: tuple[tuple[Tensor, Tensor], ...]
    dtype: torch.dtype


def expect(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Expected:
    """R and T of one problem. `layout` is honoured; the results are bhsd, those of packed members as
    packed."""
    if "cu_seqlens_q" in options:
        return expect_packed(q, k, v, options)
    layout = options.pop("layout", "bhsd")
    q, k, v = (bhsd(x.detach(), layout) for x in (q, k, v))
    oracle = attention_reference(q, k, v, **options)
    v = torch.where(
        torch.isfinite(v), v, 0
    )  # eager ops would carry NaN to every row; rows that see it are not compared
    out, lse = (x.double() for x in eager(q, k, v, **options))
    if not (
        torch.isfinite(out) | ~torch.isfinite(oracle.out)
    ).all():  # scores beyond float16: round the result alone
        out, lse = (x.double() for x in eager(q.float(), k.float(), v.float(), **options))
        out = out.to(q.dtype).double()
    samples = [(out, lse)]
    if q.dtype is torch.float32:
        problems = [("chain", q, k), ("turned", q, k)]
        if q.shape[:3].numel() < FEW_ROWS:
            generator = torch.Generator().manual_seed(0)
            orders = [torch.randperm(q.shape[3], generator=generator) for _ in range(SHUFFLES)]
            problems += [("chain", q[..., order], k[..., order]) for order in orders]
        for order, own_q, own_k in problems:
            out, lse = eager(own_q, own_k, v, order=order, **options)
            samples.append((out.double(), lse.double()))
    return Expected(oracle.out, oracle.lse, tuple(samples), q.dtype)


def expect_packed(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Expected:
    """R is the packed oracle's; T is that of each member alone, and nothing elsewhere."""
    q, k, v = (x.detach() for x in (q, k, v))
    rest = {n: x for n, x in options.items() if not n.startswith("max_seqlen")}
    cu_seqlens = rest.pop("cu_seqlens_q"), rest.pop("cu_seqlens_k")
    oracle = varlen_reference(q, k, v, *cu_seqlens, **rest)
    orders = 3 + SHUFFLES if q.dtype is torch.float32 else 1
    samples = [(oracle.out.clone(), oracle.lse.clone()) for _ in range(orders)]
    for at, of, (one_q, one_k, one_v, own) in members(q, k, v, options):
        if at.start == at.stop or of.start == of.stop:
            continue
        found = expect(one_q, one_k, one_v, **own).eager
        for (out, lse), (one_out, one_lse) in zip(samples, itertools.cycle(found), strict=False):
            out[at], lse[:, at] = one_out[0].transpose(0, 1), one_lse[0]
    return Expected(oracle.out, oracle.lse, tuple(samples), q.dtype)


def check(
    out: Tensor,
    lse: Tensor | None,
    want: Expected,
    *,
    label: str = "",
    options: dict[str, Any] | None = None,
    pool: Figures | None = None,
    loose: bool = False,
) -> None:
    """One forward result against R and T: dtype and shape, NaN pattern, the three rules, and the LSE rule."""
    options = options or {}
    loose = loose or bool(options.get("softcap")) or options.get("alibi_slopes") is not None
    assert out.dtype is want.dtype, f"{label}: out is {out.dtype}, not {want.dtype}"
    samples = [sample for sample, _ in want.eager]
    compare(out, want.out, samples, want.dtype, ratio=3 if loose else 2, label=f"{label} out", pool=pool)
    if lse is not None:
        check_lse(lse, want, label=label)


@dataclass
class Figures:
    """The errors of one comparison, or of several pooled: ours and T's, with u and the number of rows."""

    ours: tuple[float, float, float] = (0.0, 0.0, 0.0)
    theirs: tuple[float, float, float] = (0.0, 0.0, 0.0)
    u: float = 0.0
    own: float = 0.0
    rows: int = 0
    ratio: float = 2.0
    where: str = ""

    def add(self, other: Figures) -> None:
        rows = max(1, self.rows + other.rows)

        def pooled(
            a: tuple[float, float, float], b: tuple[float, float, float]
        ) -> tuple[float, float, float]:
            return max(a[0], b[0]), (a[1] * self.rows + b[1] * other.rows) / rows, max(a[2], b[2])

        self.where = other.where if other.ours[0] >= self.ours[0] else self.where
        self.ours, self.theirs = pooled(self.ours, other.ours), pooled(self.theirs, other.theirs)
        self.u, self.own = max(self.u, other.u), max(self.own, other.own)
        self.rows, self.ratio = rows, max(self.ratio, other.ratio)

    def hold(self, dtype: torch.dtype, label: str) -> None:
        (e, a, w), (et, at, wt), u = self.ours, self.theirs, self.u
        assert e <= self.ratio * et + u, (
            f"{label}: max error {e:.3g} > {self.ratio}·{et:.3g} + {u:.3g}{self.where}"
        )
        assert self.rows < FEW_ROWS or a <= 1.5 * at + u / 8, (
            f"{label}: mean error {a:.3g} > 1.5·{at:.3g} + {u:.3g}/8"
        )
        luck = 4 if self.rows >= FEW_ROWS else 8  # of T's worst row, where there are few
        allowed = luck * wt + 8 * torch.finfo(dtype).eps + 10 * self.own
        assert w <= allowed, f"{label}: worst row {w:.3g} > {allowed:.3g} (T {wt:.3g})"


def compare(
    ours: Tensor,
    right: Tensor,
    samples: list[Tensor],
    dtype: torch.dtype,
    *,
    ratio: float,
    label: str,
    pool: Figures | None = None,
    own: float = 0.0,
) -> None:
    """The relative rule of this module's docstring. `right` and T's `samples` (of which the worst counts) in
    float64;
    rows are the last dimension. With a `pool`, shape and pattern are held now and the figures by
    `pool.hold()`: over
    many tiny problems the maximum of each alone is luck."""
    assert tuple(ours.shape) == tuple(right.shape), (
        f"{label}: shape {tuple(ours.shape)}, wanted {tuple(right.shape)}"
    )
    if right.numel() == 0:
        return
    rounded = right.to(dtype)
    same_pattern(ours, rounded, label)
    finite = torch.isfinite(rounded)
    right, mine = (torch.where(finite, x.detach().double(), 0.0) for x in (right, ours))
    theirs = [torch.where(finite & torch.isfinite(x), x, right) for x in samples]
    rounded = torch.where(finite, rounded, 0)
    if dtype is torch.float64:
        own += 1e-12  # the oracle rounds too, and T may round like it
    figures = Figures(
        ours=_errors(mine, right),
        theirs=tuple(max(f) for f in zip(*(_errors(x, right) for x in theirs), strict=True)),  # type: ignore[arg-type]
        u=max(
            2 * float((((rounded + 0.3) - 0.3) - rounded).abs().max()), unit(float(right.abs().max()), dtype)
        )
        + own * float(right.abs().max()),
        own=own,
        rows=int((right != 0).any(-1).sum()) if right.ndim else 1,  # those that see nothing are no draw
        ratio=ratio,
        where=_where(mine, right) + (f" in {label}" if pool is not None else ""),
    )
    if pool is None:
        figures.hold(dtype, label)
    else:
        pool.add(figures)


def unit(size: float, dtype: torch.dtype) -> float:
    """The distance between neighbours of `dtype` at a magnitude."""
    return torch.finfo(dtype).eps * 2.0 ** (math.frexp(size)[1] - 1) if size else 0.0


def same_pattern(ours: Tensor, right: Tensor, label: str) -> None:
    """NaN, +inf and -inf sit in exactly the same places."""
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        a, b = test(ours.detach()), test(right.detach())
        if not torch.equal(a, b):
            at = (a != b).nonzero()[0].tolist()
            raise AssertionError(
                f"{label}: {name} in {int(a.sum())} places, wanted {int(b.sum())}; first differs at {at}"
            )


def check_lse(lse: Tensor, want: Expected, *, label: str = "") -> None:
    """LSE rule: |L - L64| ≤ 2·|L_T - L64| + 1e-5·max(1, |L64|), -inf in the same places; fp32 (fp64 for
    fp64)."""
    wide = torch.float64 if want.dtype is torch.float64 else torch.float32
    assert lse.dtype is wide, f"{label}: lse is {lse.dtype}, not {wide}"
    assert tuple(lse.shape) == tuple(want.lse.shape), (
        f"{label}: lse {tuple(lse.shape)}, wanted {tuple(want.lse.shape)}"
    )
    assert lse.is_contiguous(), f"{label}: lse is not contiguous"
    same_pattern(lse, want.lse, f"{label} lse")
    finite = torch.isfinite(want.lse)
    right = want.lse[finite]
    error = (lse.detach().double()[finite] - right).abs()
    samples = [torch.nan_to_num((lse[finite] - right).abs(), nan=0.0, posinf=0.0) for _, lse in want.eager]
    theirs = torch.stack(samples).amax(0)
    unit = 1e-12 if wide is torch.float64 else 1e-5
    excess = error - (2 * theirs + unit * right.abs().clamp(min=1))
    worst = float(excess.max()) if excess.numel() else 0.0
    assert worst <= 0, (
        f"{label}: lse off by {float(error[excess.argmax()]):.3g} at {float(right[excess.argmax()]):.6g}"
    )


def check_backstop(out: Tensor, want: Expected, *, family: str = "normal", label: str = "") -> None:
    """Absolute bound on relative L2: normal inputs, head_dim 64 to 128; five times that with a channel bias
    in Q and K."""
    bound = BACKSTOP[want.dtype] * {"normal": 1, "kbias": 1.5, "qkbias": 5}[family]
    error = relative_l2(out, want.out)
    assert error <= bound, f"{label}: relative L2 {error:.3g} > {bound:.3g}"


def relative_l2(x: Tensor, right: Tensor) -> float:
    """|x - right| / |right| in float64; 0 if both are zero."""
    scale = float(right.double().norm())
    error = float((x.detach().double() - right.double()).norm())
    return error / scale if scale else error


def bits(x: Tensor) -> Tensor:
    """The stored bits as integers, so that NaN compares equal to itself."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(kind)


def same_of_other_strides(backend: str, a: Tensor, b: Tensor, label: str = "") -> None:
    """Equal bits; where a kernel is compiled anew for other strides (Triton on a GPU), equal up to the order
    of its sums."""
    if backend == "triton":
        near(a, b, 1e-6)
    else:
        same_bits(a, b, label)


def same_bits_of_strides(a: Tensor, b: Tensor, label: str = "") -> None:
    """Of results whose operands lay otherwise in memory. A GPU runs kernels of their own for other kinds of
    strides, and those may take float32 sums in another order."""
    if device.DEVICE.type == "cpu":
        same_bits(a, b, label)
    else:
        near(a, b, {torch.float32: 2e-6}.get(a.dtype, 4e-3), label)


def same_bits(a: Tensor, b: Tensor, label: str = "") -> None:
    """Bitwise equality, NaN included."""
    assert a.shape == b.shape and a.dtype is b.dtype, (
        f"{label}: {a.shape} {a.dtype} against {b.shape} {b.dtype}"
    )
    if not torch.equal(bits(a), bits(b)):
        at = (bits(a) != bits(b)).nonzero()
        first = tuple(at[0].tolist())
        raise AssertionError(
            f"{label}: {len(at)} elements differ, first at {first}: {a[first]} against {b[first]}"
        )


def near(a: Tensor, b: Tensor, bound: float, label: str = "") -> None:
    """Relative L2 of a metamorphic pair, after the NaN pattern."""
    same_pattern(a, b, label)
    finite = torch.isfinite(b)
    error = relative_l2(torch.where(finite, a, 0), torch.where(finite, b, 0))
    assert error <= bound, f"{label}: relative L2 {error:.3g} > {bound:.3g}"


def _errors(x: Tensor, right: Tensor) -> tuple[float, float, float]:
    """Maximum, mean, and worst relative row."""
    error = (x - right).abs()
    unit = float(right.abs().max()) or 1.0  # squares of the largest float64 would overflow
    if right.ndim == 0:
        error, right = error[None], right[None]
    norms, rows = (right / unit).norm(dim=-1), (error / unit).norm(dim=-1)
    scale = norms + 1e-3 * norms.max()
    return float(error.max()), float(error.mean()), float(torch.where(scale > 0, rows / scale, rows).max())


def _where(x: Tensor, right: Tensor) -> str:
    at = (x - right).abs().argmax()
    index = tuple(int(i) for i in torch.unravel_index(at, x.shape)) if x.ndim else ()
    return f", worst at {index}: {float(x[index]):.6g}, wanted {float(right[index]):.6g}"
