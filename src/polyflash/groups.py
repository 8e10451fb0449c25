"""Groups of query rows that share one key/value set, each with its own place and length among the keys.

Fused, all groups are the rows of one call: the keys are walked once, and each block of them serves every row
that sees it. Separate, each group is a call of its own: the keys are read once per group, by kernels that
skip whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Never, Unpack, overload

import torch
from torch import Tensor

from polyflash import validate
from polyflash.arguments import Layout, Options, WindowSides, checked_int
from polyflash.entry import Bound, attend, bind, explained, form_of, views_of
from polyflash.errors import UnsupportedError, described, spec_error
from polyflash.hints import answering, unexpected
from polyflash.mask import FAR_OFFSET, checked_window
from polyflash.merging import AttentionOutput
from polyflash.plan import Plan
from polyflash.quant.tensor import KV, values_of
from polyflash.target import Target
from polyflash.transforms import INFERENCE_ONLY

if TYPE_CHECKING:
    from polyflash.keywords import OfGroups

# Rows per key/value head: of all groups together, and of the average group where there are several.
FEW_ROWS, MANY_ROWS, SEVERAL_GROUPS = 4, 128, 4
KEYS_PER_ROW = 32  # at least, for many rows to share a walk


def fuses(rows: Sequence[int], kv_lens: Sequence[int], *, num_q_heads: int, num_kv_heads: int) -> bool:
    """Is one walk over the keys better than one per group? `rows` and `kv_lens` are those of each group.

    Two groups or more must share keys; and their rows must be so few that reading the keys, which is done
    once then, is all that counts, or so many that they share the copy of each block. In between, a walk for
    each reads at memory speed, and one walk makes products with keys that few rows see. Measured on one CPU:
    docs/groups.md."""
    sharing = sum(1 for n, keys in zip(rows, kv_lens, strict=True) if n and keys)
    packed = sum(rows) * (num_q_heads // max(1, num_kv_heads))
    few = FEW_ROWS * (sharing if sharing >= SEVERAL_GROUPS else 1)
    many = packed >= MANY_ROWS and packed * KEYS_PER_ROW <= max(kv_lens, default=0)
    return sharing > 1 and (packed <= few or many)


@dataclass(frozen=True)
class GroupsPlan:
    """The result of `explain_groups()`: whether the groups are fused, why, and the plan of every call: of one
    if they are, else of one per group."""

    fused: bool
    why: str
    plans: tuple[Plan, ...]

    def __str__(self) -> str:
        how = "one walk over the keys" if self.fused else f"{len(self.plans)} calls"
        return "\n".join((f"groups: {how}: {self.why}", *map(str, self.plans)))


class _Groups(NamedTuple):
    """A checked call. Layout is (batch, heads, seqlen, head_dim)."""

    q: list[Tensor]
    k: Tensor
    v: Tensor
    offsets: list[int]
    kv_lens: list[int]
    options: Options

    @property
    def rows(self) -> list[int]:
        return [q.shape[2] for q in self.q]

    def fused(self, fused: bool | None) -> tuple[bool, str]:
        """Whether all groups are one call, and why."""
        if not self.q:
            return False, "there are none"
        heads, kv_heads = self.q[0].shape[1], self.k.shape[1]
        chosen = fuses(self.rows, self.kv_lens, num_q_heads=heads, num_kv_heads=kv_heads)
        if fused is None:
            packed = sum(self.rows) * (heads // max(1, kv_heads))
            several = f"{FEW_ROWS} a group in {SEVERAL_GROUPS} groups or more"
            long = f"{MANY_ROWS} on if there are {KEYS_PER_ROW} keys for each"
            rule = f"fused up to {FEW_ROWS}, up to {several}, and from {long}"
            return chosen, f"{packed} rows per key/value head in {len(self.q)} groups, {rule}"
        return fused, f"asked for by fused={fused}"

    def calls(self, fused: bool) -> list[Bound]:
        """The calls of the op: one, or one per group."""
        options = self.options
        if fused:
            end = max(self.kv_lens)
            one = options._replace(causal=False, window=None)  # causal and window are bounds of rows here
            bound = bind(torch.cat(self.q, 2), self.k[:, :, :end], self.v[:, :, :end], one)
            return [bound._replace(args=bound.args._replace(row_bounds=self._row_bounds()))]
        placed = options.causal or options.window is not None
        calls = []
        for q, offset, end in zip(self.q, self.offsets, self.kv_lens, strict=True):
            own = options._replace(q_offset=offset if placed else None)
            calls.append(bind(q, self.k[:, :, :end], self.v[:, :, :end], own))
        return calls

    def _row_bounds(self) -> Tensor:
        """Keys [lo, hi) that each row of all groups sees, int32 (rows, 2)."""
        device = self.q[0].device
        left, right = self.options.window or (None, None)
        right = 0 if self.options.causal else right
        groups = list(zip(self.rows, self.offsets, self.kv_lens, strict=True))
        at = torch.cat([torch.arange(n, device=device) + offset for n, offset, _ in groups])
        ends = torch.cat([torch.full((n,), end, dtype=torch.int64, device=device) for n, _, end in groups])
        lo = torch.zeros_like(at) if left is None else torch.minimum((at - left).clamp(min=0), ends)
        hi = ends if right is None else torch.minimum((at + right + 1).clamp(min=0), ends)
        return torch.stack((lo, hi), 1).to(torch.int32)


@overload
def attention_groups(
    q_groups: Sequence[Tensor],
    k: KV,
    v: KV,
    *,
    return_lse: Literal[False] = ...,
    **x: Unpack[OfGroups],
) -> list[Tensor]: ...
@overload
def attention_groups(
    q_groups: Sequence[Tensor], k: KV, v: KV, *, return_lse: Literal[True], **x: Unpack[OfGroups]
) -> list[AttentionOutput]: ...
@answering
def attention_groups(
    q_groups: Sequence[Tensor], k: KV, v: KV, *, q_offsets: Sequence[int],
    kv_lens: Sequence[int] | None = None, causal: bool = True, window: WindowSides | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, scale: float | None = None, layout: Layout = "bhsd",
    return_lse: bool = False, fused: bool | None = None, backend: str | None = None, config: Any = None,
    **unknown: Never,
) -> list[Tensor] | list[AttentionOutput]:  # fmt: skip
    """`attention` of several groups of query rows to the first keys of one k and v, each group with its own
    place and length among them: the chunks of a rank in context parallelism, drafts that share a prefix.

    Row i of group g stands at position q_offsets[g] + i, and sees keys below kv_lens[g] only. For inference:
    no gradients. Arguments not listed are those of `attention`.

    Args:
        q_groups: any number of tensors (batch, num_q_heads, S_g, head_dim), or (batch, S_g, num_q_heads,
            head_dim) with layout="bshd"; S_g may differ and be 0.
        k: (batch, num_kv_heads, seqlen_k, head_dim) in `layout`, dtype of the groups; or a `QuantizedTensor`,
            which is decoded first.
        v: (batch, num_kv_heads, seqlen_k, head_dim_v) in `layout`, likewise.
        q_offsets: one int per group, the position of its row 0 among the keys.
        kv_lens: one int per group, 0 to seqlen_k: it sees none of the keys beyond. None: all keys.
        causal: key j is visible to a row at position p iff j <= p.
        window: (left, right) neighbours of a row's position, itself not counted; None is unbounded.
        fused: True walks the keys once for all groups, False makes one call per group, None takes what is
            faster for groups of these sizes (`fuses`). The results agree within rounding.

    Returns:
        One tensor per group, shaped as the group with head_dim_v; with return_lse=True one
        `AttentionOutput(out, lse)` per group, lse (batch, num_q_heads, S_g). Those of fused groups are views
        of one tensor.

    Raises:
        SpecError: as `attention`; groups that differ in more than S_g; a length that is no int per group.
        UnsupportedError: as `attention`; an input needs a gradient."""
    if unknown:
        raise unexpected(attention_groups, unknown)
    scores = {"causal": causal, "window": window, "softcap": softcap, "sinks": sinks, "scale": scale}
    how = {"return_lse": return_lse, "backend": backend, "config": config}
    groups = _checked(q_groups, k, v, q_offsets, kv_lens, layout, **scores, **how)
    together = groups.fused(_flag("fused", fused))[0]
    results = [attend(bound) for bound in groups.calls(together)]
    if together:
        out, lse = results[0]
        lses = lse.split(groups.rows, 2) if return_lse else [lse] * len(groups.q)
        results = list(zip(out.split(groups.rows, 2), lses, strict=True))
    if layout == "bshd":
        results = [(out.transpose(1, 2), lse) for out, lse in results]
    return list(starmap(AttentionOutput, results)) if return_lse else [out for out, _ in results]


def explain_groups(
    q_groups: Sequence[Tensor], k: KV, v: KV, *, q_offsets: Sequence[int],
    kv_lens: Sequence[int] | None = None, causal: bool = True, window: WindowSides | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, scale: float | None = None, layout: Layout = "bhsd",
    return_lse: bool = False, fused: bool | None = None, backend: str | None = None, config: Any = None,
    target: str | Target | None = None,
) -> GroupsPlan:  # fmt: skip
    """Whether `attention_groups(...)` with these arguments would fuse its groups, why, and who would run each
    call. Launches nothing and reads no tensor contents: all may be meta tensors; `target` as in `explain`."""
    scores = {"causal": causal, "window": window, "softcap": softcap, "sinks": sinks, "scale": scale}
    how = {"return_lse": return_lse, "backend": backend, "config": config}
    groups = _checked(q_groups, k, v, q_offsets, kv_lens, layout, **scores, **how)
    together, why = groups.fused(_flag("fused", fused))
    plans = tuple(explained(bound, target) for bound in groups.calls(together))
    return GroupsPlan(together, why, plans)


def _checked(
    q_groups: Any, k: Any, v: Any, q_offsets: Any, kv_lens: Any, layout: str, **given: Any
) -> _Groups:
    """The groups as views (batch, heads, seqlen, head_dim), with an offset and a length for each."""
    if isinstance(q_groups, Tensor) or not isinstance(q_groups, Sequence):
        change = "Use list(q.split(sizes, 2)) to cut a tensor into groups."
        raise spec_error("q_groups", described(q_groups), "a list of tensors", change)
    k, v = values_of(k), values_of(v)
    first = q_groups[0] if q_groups else k
    if layout != "bhsd":
        first, k, v, _ = views_of(form_of(layout), first, k, v)
    validate.check_shapes(first, k, v)
    groups = []
    for index, q in enumerate(q_groups):
        q = views_of(form_of(layout), q, k, v)[0] if layout != "bhsd" else q
        if not (isinstance(q, Tensor) and q.ndim == 4 and _kind(q) == _kind(first)):
            wanted = f"{described(first)} on {first.device}, as group 0, but for the rows"
            where = f" on {q.device}" if isinstance(q, Tensor) else ""
            change = "Groups share keys, so all but the number of their rows must agree."
            raise spec_error(f"q_groups[{index}]", f"{described(q)}{where}", wanted, change)
        groups.append(q)
    inputs = (*groups, k, v, given["sinks"])
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise UnsupportedError(f"attention_groups {INFERENCE_ONLY}")
    seqlen_k = k.shape[2]
    offsets = [max(-FAR_OFFSET, min(n, FAR_OFFSET)) for n in _ints("q_offsets", q_offsets, len(groups))]
    lens = [seqlen_k] * len(groups) if kv_lens is None else _ints("kv_lens", kv_lens, len(groups))
    for index, n in enumerate(lens):
        if not 0 <= n <= seqlen_k:
            change = "It counts the keys that the group may see, from the first on."
            raise spec_error(f"kv_lens[{index}]", n, f"0 to {seqlen_k}, the keys of k", change)
    if given["window"] is not None:
        sides = checked_window(given["window"])
        given["window"] = None if sides == (None, None) else sides
    given["causal"] = bool(_flag("causal", given["causal"]))
    return _Groups(groups, k, v, offsets, lens, Options(**given))


def _kind(q: Tensor) -> tuple[Any, ...]:
    """The properties groups must have in common."""
    return q.shape[0], q.shape[1], q.shape[3], q.dtype, q.device


def _flag(name: str, value: Any) -> bool | None:
    if value is True or value is False or (value is None and name == "fused"):
        return value
    change = "Positions of groups are absolute, so there is no alignment to choose."
    if name == "fused":
        change = "None takes what is faster."
    raise spec_error(name, described(value), "True or False", change)


def _ints(name: str, values: Any, count: int) -> list[int]:
    """One int per group."""
    if isinstance(values, Tensor) or not isinstance(values, Sequence) or len(values) != count:
        change = "Use .tolist() on a tensor."
        raise spec_error(name, described(values), f"a list of {count}, one int per group", change)
    return [checked_int(f"{name}[{index}]", n, "an int") for index, n in enumerate(values)]
