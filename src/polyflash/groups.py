"""Groups of query rows that share one key/value set, each with its own place and length among the keys.

Fused, all groups are the rows of one call: the keys are walked once, and each block of them serves every row
that sees it; or on a GPU the requests of one batch over the same memory, in one launch. Separate, each group
is a call of its own: the keys are read once per group, by kernels that skip whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Never, Unpack, overload

import torch
from torch import Tensor

from polyflash import target as targets
from polyflash import torch_ops, validate
from polyflash.arguments import Layout, Options, WindowSides, checked_int, normalise
from polyflash.entry import Bound, autocast, explained, explained_backward, form_of, views_of
from polyflash.errors import SpecError, UnsupportedError, described, spec_error
from polyflash.group_calls import OWN, REQUESTS, ROWS, SEPARATE, are_alike, attend_groups, joined
from polyflash.hints import answering, unexpected
from polyflash.mask import FAR_OFFSET, Mask, checked_window
from polyflash.merging import AttentionOutput
from polyflash.plan import Plan
from polyflash.quant.tensor import KV, values_of
from polyflash.routes import any_requires_grad
from polyflash.target import Target

if TYPE_CHECKING:
    from polyflash.keywords import OfGroups


class Rule(NamedTuple):
    """How many rows are fused, per key/value head."""

    few: int  # of all groups together up to so many, or of the average one where there are several
    several: int
    many: int | None  # and from so many on, with keys for each
    keys_per_row: int
    alike: int  # and up to so many rows of all query heads of a group, where all have as many

    def __str__(self) -> str:
        found = [f"up to {self.few}", f"up to {self.few} a group in {self.several} groups or more"]
        if self.many is not None:
            found.append(f"from {self.many} on if there are {self.keys_per_row} keys for each")
        if self.alike:
            found.append(f"up to {self.alike} of all query heads of each of groups that are alike")
        return f"fused {', '.join(found)}"


RULES = {
    "cpu": Rule(4, 4, 128, 32, 0),  # docs/results/2026-11-20-epyc-zen4-2core-decode.md
    "gpu": Rule(256, 2, None, 0, 1 << 14),  # docs/results/2026-11-26-h100-groups.md
}
REQUEST_ROWS = 64  # of a group, from which on a GPU takes alike groups for requests of one batch


def fuses(
    rows: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    on_gpu: bool = False,
    alike: bool = False,
) -> bool:
    """Is one call better than one per group? `rows` and `kv_lens` are those of each group; `alike`: could
    groups be the requests of one batch?

    Two groups or more must share keys; and their rows must be so few that reading the keys, which is done
    once then, is all that counts, or on a CPU so many that they share the copy of each block. In between, a
    walk for each reads at memory speed, and one walk makes products with keys that few rows see. On a GPU
    alike groups are fused while one alone leaves cores idle. `RULES` has the numbers, and where they were
    measured."""
    rule = RULES["gpu" if on_gpu else "cpu"]
    sharing = sum(1 for n, keys in zip(rows, kv_lens, strict=True) if n and keys)
    packed = sum(rows) * (num_q_heads // max(1, num_kv_heads))
    few = rule.few * (sharing if sharing >= rule.several else 1)
    many = rule.many is not None and packed >= rule.many
    many = many and packed * rule.keys_per_row <= max(kv_lens, default=0)
    idle = alike and max(rows, default=0) * num_q_heads <= rule.alike
    return sharing > 1 and (packed <= few or many or idle)


@dataclass(frozen=True)
class GroupsPlan:
    """The result of `explain_groups()`: whether the groups are fused, why, and the plan of every call: of one
    if they are, else of one per group. `backward` has one per group, if an input needs a gradient."""

    fused: bool
    why: str
    plans: tuple[Plan, ...]
    backward: tuple[Plan, ...] = ()

    def __str__(self) -> str:
        how = "one call" if self.fused else f"{len(self.plans)} calls"
        lines = [f"groups: {how}: {self.why}", *map(str, self.plans)]
        if self.backward:
            lines += ["gradients: a call per group, whose sums for k, v and sinks are added in float32"]
        return "\n".join((*lines, *map(str, self.backward)))


class _Groups(NamedTuple):
    """A checked call of groups: each as a call of its own, to the first keys of k and v. Layout is (batch,
    heads, seqlen, head_dim)."""

    calls: list[Bound]
    k: Tensor
    v: Tensor

    def how(self, fused: bool | None, on_gpu: bool) -> tuple[str, str]:
        """How groups are run, as `joined` has it, and why."""
        if not self.calls:
            return SEPARATE, "there are none"
        own = [(i, x) for i, call in enumerate(self.calls) for x in OWN if getattr(call.args, x) is not None]
        if own and fused is not False:
            why = f"group {own[0][0]} has {own[0][1]}, and one walk tells rows by their bounds alone"
            if fused:
                change = "Use fused=None, or say the same with causal=, window=, kv_lens="
                raise UnsupportedError(f"fused=True: {why}. {change}")
            return SEPARATE, why
        if fused is False:
            return SEPARATE, f"asked for by fused={fused}"
        alike = on_gpu and self.calls[0].q.shape[2] >= REQUEST_ROWS and are_alike(self.calls)
        how, form = (REQUESTS, "; they are requests of one batch") if alike else (ROWS, "")
        if fused:
            return how, f"asked for by fused={fused}{form}"
        rows, heads = [call.q.shape[2] for call in self.calls], self.calls[0].q.shape[1]
        kv_lens, kv_heads = [call.k.shape[2] for call in self.calls], self.k.shape[1]
        packed = sum(rows) * (heads // max(1, kv_heads))
        given: dict[str, Any] = {"num_q_heads": heads, "num_kv_heads": kv_heads}
        chosen = fuses(rows, kv_lens, **given, on_gpu=on_gpu, alike=alike)
        why = f"{packed} rows per key/value head in {len(rows)} groups, {RULES['gpu' if on_gpu else 'cpu']}"
        return (how, f"{why}{form}") if chosen else (SEPARATE, why)


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
    kv_lens: Sequence[int] | None = None, causal: bool = True,
    window: WindowSides | Sequence[WindowSides | None] | None = None,
    mask: Tensor | Mask | Sequence[Tensor | Mask | None] | None = None,
    bias: Tensor | Sequence[Tensor | None] | None = None, alibi_slopes: Tensor | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, scale: float | None = None, layout: Layout = "bhsd",
    return_lse: bool = False, fused: bool | None = None, backend: str | None = None, config: Any = None,
    **unknown: Never,
) -> list[Tensor] | list[AttentionOutput]:  # fmt: skip
    """`attention` of several groups of query rows to the first keys of one k and v, each group with its own
    place and length among them: the chunks of a rank in context parallelism, drafts that share a prefix.

    Row i of group g stands at position q_offsets[g] + i, and sees keys below kv_lens[g] only. Outputs and
    LSEs are differentiable; gradients of k, v and sinks are summed over groups in float32 and rounded once.
    Arguments not listed are those of `attention`; `window`, `mask` and `bias` are one for all groups, or a
    list with one per group.

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
        mask: bool, True = attend, broadcastable to (batch, num_q_heads, S_g, seqlen_k); or a `Mask`, whose
            segment ids are (batch, S_g) and (batch, seqlen_k).
        bias: any float dtype, broadcastable likewise; has a gradient.
        fused: True makes one call of all groups, False makes one call per group, None takes what is
            faster for groups of these sizes (`fuses`). The results agree within rounding.

    Returns:
        One tensor per group, shaped as the group with head_dim_v; with return_lse=True one
        `AttentionOutput(out, lse)` per group, lse (batch, num_q_heads, S_g). Those of fused groups are views
        of one tensor.

    Raises:
        SpecError: as `attention`; groups that differ in more than S_g; a length that is no int per group.
        UnsupportedError: as `attention`; fused=True beside a mask, bias or ALiBi."""
    if unknown:
        raise unexpected(attention_groups, unknown)
    each: dict[str, Any] = {"window": window, "mask": mask, "bias": bias}
    given: dict[str, Any] = {"causal": causal, "alibi_slopes": alibi_slopes, "softcap": softcap}
    given |= {"sinks": sinks, "scale": scale, "return_lse": return_lse, "backend": backend, "config": config}
    groups = _checked(q_groups, k, v, q_offsets, kv_lens, layout, each, given)
    how, _ = groups.how(_flag("fused", fused), _on_gpu(groups.k))
    results = attend_groups(*groups, how)
    if layout == "bshd":
        results = [(out.transpose(1, 2), lse) for out, lse in results]
    return list(starmap(AttentionOutput, results)) if return_lse else [out for out, _ in results]


def explain_groups(
    q_groups: Sequence[Tensor],
    k: KV,
    v: KV,
    *,
    q_offsets: Sequence[int],
    kv_lens: Sequence[int] | None = None,
    causal: bool = True,
    window: WindowSides | Sequence[WindowSides | None] | None = None,
    mask: Tensor | Mask | Sequence[Tensor | Mask | None] | None = None,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    fused: bool | None = None,
    backend: str | None = None,
    config: Any = None,
    target: str | Target | None = None,
) -> GroupsPlan:
    """Whether `attention_groups(...)` with these arguments would fuse its groups, why, and who would run each
    call, and each group's gradients if an input needs one. Launches nothing and reads no tensor contents: all
    may be meta tensors; `target` as in `explain`."""
    each: dict[str, Any] = {"window": window, "mask": mask, "bias": bias}
    given: dict[str, Any] = {"causal": causal, "alibi_slopes": alibi_slopes, "softcap": softcap}
    given |= {"sinks": sinks, "scale": scale, "return_lse": return_lse, "backend": backend, "config": config}
    groups = _checked(q_groups, k, v, q_offsets, kv_lens, layout, each, given)
    how, why = groups.how(_flag("fused", fused), _on_gpu(groups.k, target))
    calls, backward = groups.calls, []
    if torch.is_grad_enabled() and any(any_requires_grad(x.q, x.k, x.v, x.args) for x in calls):
        calls = [x._replace(args=x.args._replace(need_lse=True)) for x in calls]
        wide = [x._replace(args=x.args._replace(wide_gradients=True)) for x in calls]
        backward = [explained_backward(x, target) for x in wide]
    with torch.no_grad():  # as their gradients are made, they run
        plans = [explained(x, target) for x in joined(calls, how)]
    return GroupsPlan(bool(how), why, tuple(plans), tuple(backward))


def _checked(
    q_groups: Any,
    k: Any,
    v: Any,
    q_offsets: Any,
    kv_lens: Any,
    layout: str,
    each: dict[str, Any],
    given: dict[str, Any],
) -> _Groups:
    """Every group as a call of its own over views (batch, heads, seqlen, head_dim). Of options, `each` are
    one for all groups or one per group, `given` are of all."""
    groups, k, v = _views(q_groups, k, v, layout)
    count, seqlen_k = len(groups), k.shape[2]
    offsets = [max(-FAR_OFFSET, min(n, FAR_OFFSET)) for n in _ints("q_offsets", q_offsets, count)]
    lens = [seqlen_k] * count if kv_lens is None else _ints("kv_lens", kv_lens, count)
    for index, n in enumerate(lens):
        if not 0 <= n <= seqlen_k:
            change = "It counts the keys that the group may see, from the first on."
            raise spec_error(f"kv_lens[{index}]", n, f"0 to {seqlen_k}, the keys of k", change)
    given["causal"] = bool(_flag("causal", given["causal"]))
    lists = {name: _per_group(name, x, count) for name, x in each.items()}
    if not groups:  # what is said is checked all the same
        normalise(Options(**given))
    autocasts = groups and torch_ops.autocasting(groups[0].device.type)
    if autocasts:
        _, k, v = autocast(groups[0], k, v)
        groups = [autocast(q, k, v)[0] for q in groups]
    calls = []
    for index, (q, offset, end) in enumerate(zip(groups, offsets, lens, strict=True)):
        own = {name: x[index] for name, x in lists.items()}
        try:
            calls.append(_call(q, k, v, offset, end, own, given))
        except SpecError as error:
            raise _named(error, index, lists, each) from None
    return _Groups(calls, k, v)


def _views(q_groups: Any, k: Any, v: Any, layout: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """All tensors as (batch, heads, seqlen, head_dim), and groups that belong together."""
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
    return groups, k, v


def _call(
    q: Tensor, k: Tensor, v: Tensor, offset: int, end: int, own: dict[str, Any], given: dict[str, Any]
) -> Bound:
    """One group as a call over the first `end` keys."""
    seqlen_k, mask, sides = k.shape[2], own["mask"], own["window"]
    sides = (None, None) if sides is None else checked_window(sides)
    own = own | {"bias": _first_keys("bias", own["bias"], seqlen_k, end)}
    placed = given["causal"] or sides != (None, None) or given["alibi_slopes"] is not None
    if isinstance(mask, Mask):
        placed = placed or mask.alignment is not None or mask.window_sides != (None, None)
        lens, starts = (_up_to(x, seqlen_k, end) for x in (mask.kv_lens, mask.kv_starts))
        k_ids = _first_keys("segments k_ids", mask.k_ids, seqlen_k, end, 2)
        own["mask"] = replace(mask, kv_lens=lens, kv_starts=starts, k_ids=k_ids)
    else:
        own["mask"] = _first_keys("mask", mask, seqlen_k, end)
    own["window"] = None if sides == (None, None) else sides
    args = normalise(Options(**given, **own, q_offset=offset if placed else None))
    bound = Bound(q, k[:, :, :end], v[:, :, :end], None, args)
    if not torch.compiler.is_compiling() and any(getattr(args, name) is not None for name in OWN):
        validate.check_operands(q, bound.k, args)
    return bound


def _first_keys(name: str, x: Any, seqlen_k: int, end: int, dims: int = 1) -> Any:
    """The part of an operand, with keys in its last dimension, that is of the first `end` ones."""
    if not isinstance(x, Tensor) or x.ndim < dims or (dims == 1 and x.shape[-1] == 1):
        return x
    if x.shape[-1] != seqlen_k:
        wanted = f"{seqlen_k}, one for each key of k{', or 1' if dims == 1 else ''}"
        change = "It tells of all keys; kv_lens= says how many of them the group sees."
        raise spec_error(f"{name} keys", x.shape[-1], wanted, change)
    return x if end == seqlen_k else x[..., :end]


def _up_to(x: Any, seqlen_k: int, end: int) -> Any:
    """Lengths among all keys as those among the first ones; what is no length stays, to be refused."""
    if not isinstance(x, Tensor) or end == seqlen_k:
        return x
    return torch.where(x > seqlen_k, x, x.clamp(max=end))


def _per_group(name: str, x: Any, count: int) -> list[Any]:
    """One of each group, from a list of them or from one for all."""
    one = not isinstance(x, (list, tuple))
    if name == "window" and not one:
        one = len(x) == 2 and all(side is None or not isinstance(side, (list, tuple)) for side in x)
    if one:
        return [x] * count
    if len(x) != count:
        wanted = f"one for all groups, or a list of {count}, one per group"
        raise spec_error(name, described(x), wanted, "None stands for a group without.")
    return list(x)


def _named(error: SpecError, index: int, lists: dict[str, Any], each: dict[str, Any]) -> SpecError:
    """A refusal of one group, by the name of its argument."""
    text = str(error)
    name = text.partition(":")[0].partition(" ")[0]
    if name in each:
        listed = lists[name] is not None and isinstance(each[name], (list, tuple))
        if listed and not (name == "window" and each[name] is lists[name][index]):
            return SpecError(f"{name}[{index}]{text[len(name) :]}")
        return error
    known = ("segments", "intervals", "q_segments", "k_segments", "kv_starts", "kv_lens")
    return SpecError(f"mask of group {index}: {text}") if name in known else error


def _kind(q: Tensor) -> tuple[Any, ...]:
    """The properties groups must have in common."""
    return q.shape[0], q.shape[1], q.shape[3], q.dtype, q.device


def _on_gpu(k: Tensor, target: str | Target | None = None) -> bool:
    """Does a GPU with kernels of its own run calls of these keys?"""
    return k.device.type == "cuda" if target is None else targets.of(k, target).kind in ("cuda", "hip")


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
