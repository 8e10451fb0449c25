"""One call of one rank, from its user's arguments to its rows: checks, handshake, shards, exchange."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyflash import torch_ops, validate
from polyflash.arguments import Options
from polyflash.entry import Bound, Form, autocast, bind
from polyflash.errors import SpecError, UnsupportedError, described, spec_error
from polyflash.parallel import ulysses
from polyflash.parallel.coded import Rows, as_rows, values_of
from polyflash.parallel.comm import Team
from polyflash.parallel.cost import RATES, Problem, chosen
from polyflash.parallel.exchange import Call
from polyflash.parallel.handshake import (
    KINDS,
    METHODS,
    NUMBER,
    Agreed,
    Held,
    begin,
    nothing,
    said_of,
    words_of,
)
from polyflash.parallel.ring import Attention
from polyflash.parallel.schedule import ORDERS, Lists, Segments, Shards, Sight, lengths_of
from polyflash.parallel.works import of_heads
from polyflash.quant import codec
from polyflash.quant.tensor import QuantizedTensor
from polyflash.routes import ANY, requested_backend
from polyflash.spec import Arguments

_MOST_READ, _MOST_KNOWN, _MOST_NUMBERS = 8, 64, 1 << 16
_read: list[tuple[tuple[Any, ...], Any]] = []  # every layer of a step has the same ids and bounds


class Where(NamedTuple):
    """How a call is shared, as its user wrote it."""

    method: Any = None
    order: Any = "zigzag"
    seqlens: Any = None
    handshake: Any = True


class Ranks(NamedTuple):
    """Ranks that share the sequence, and ranks that share the heads of each shard of it."""

    ring: Team
    heads: Team | None = None

    @property
    def pieces(self) -> int:
        return 1 if self.heads is None else self.heads.size

    @property
    def rank(self) -> int:
        """The number of this rank among all."""
        return self.ring.rank * self.pieces + (0 if self.heads is None else self.heads.rank)

    def meet(self, words: Sequence[int], refusal: Exception | None = None) -> Callable[[], Held]:
        """Starts the handshake; call the result for the rows of q, and of k, that each shard has."""
        words = list(words)
        if self.heads is not None:
            self.heads.calls += 1
            words[NUMBER] = self.heads.calls
            held = _met(begin(self.heads, words), refusal)
            words[-len(held) :] = map(sum, held)
        self.ring.calls += 1
        words[NUMBER] = self.ring.calls
        wait = begin(self.ring, words)
        return lambda: _met(wait, refusal)


def _met(wait: Callable[[], Held], refusal: Exception | None) -> Held:
    """Rows of each shard, as a handshake found them; a refusal of this rank's own says more."""
    try:
        return wait()
    except SpecError:
        if refusal is not None:
            raise refusal from None
        raise


def checked(where: Where, ranks: Ranks) -> None:
    """Refuses options that are none."""
    methods = METHODS[4:] if ranks.heads else METHODS[1:4]
    if where.method is not None and (not isinstance(where.method, str) or where.method not in methods):
        wanted = f"None or {', '.join(map(repr, methods))}"
        change = "'ulysses+ring' needs a mesh of two dimensions, and is what such a mesh is for."
        raise spec_error("method", described(where.method), wanted, change)
    check_order(where.order)
    if where.handshake is not True and where.handshake is not False:
        raise spec_error(
            "handshake", described(where.handshake), "True or False", "It is one message a call."
        )
    given = where.seqlens
    pair = (
        isinstance(given, (tuple, list)) and len(given) == 2 and all(type(n) is int and n >= 0 for n in given)
    )
    if given is not None and not pair:
        change = "They are the rows of q and of k on all ranks together."
        raise spec_error("seqlens", described(given), "two ints, or None", change)


def check_order(order: Any) -> None:
    if not isinstance(order, str) or order not in ORDERS:
        raise spec_error(
            "order", described(order), "'zigzag' or 'contiguous'", "split() cuts by the same one."
        )


class Part(NamedTuple):
    """One rank's part of a call: what it is, K and V being what codes stand for, without storage; K and V as
    they travel, and how to read them; whether results are to be rotated back."""

    bound: Bound
    travel: tuple[Tensor, Tensor]
    forms: tuple[Rows | None, Rows | None]
    rotated: bool


def part_of(q: Any, k: Any, v: Any, options: Options, form: Form) -> Part:
    """This rank's part of a call, checked as far as it can be without the others."""
    bound = bind(q, k, v, options, form)
    args = bound.args
    if args.dropout_p and form is Form.PACKED:
        text = (
            "parallel: dropout_p counts from the first row and key of every packed member, and no kernel can"
        )
        text += " start each of them elsewhere"
        raise UnsupportedError(f"{text}. Use polyflash.parallel.attention() with a Mask of segments")
    coded = [x for x in (bound.k, bound.v) if isinstance(x, QuantizedTensor)]
    if coded and torch.is_grad_enabled() and any(x.requires_grad for x in (bound.q, bound.k, bound.v)):
        text = "parallel: there are no gradients beside codes, which are for inference"
        raise UnsupportedError(f"{text}. Use torch.no_grad(), or pass dequantize(k) and dequantize(v)")
    if coded:
        q, *_ = autocast(bound.q, bound.q, bound.q)
        k_rows, v_rows = (
            as_rows(autocast(x, x, x)[0] if isinstance(x, Tensor) else x, q.dtype) for x in bound[1:3]
        )
        k, v = (
            q.new_empty(()).expand(*x.shape[:3], rows.width) if rows else x for x, rows in (k_rows, v_rows)
        )
    else:
        q, k, v = autocast(bound.q, bound.k, bound.v)
        k_rows, v_rows = (k, None), (v, None)
    validate.check_shapes(q, k, v)
    turned = [isinstance(x, QuantizedTensor) and x.scheme.rotation != "none" for x in bound[1:3]]
    q = codec.rotate(q) if turned[0] else q
    bound = bound._replace(q=q, k=k, v=v, args=args._replace(backend=requested_backend(args) or ANY))
    return Part(bound, (k_rows[0], v_rows[0]), (k_rows[1], v_rows[1]), turned[1])


class Plan(NamedTuple):
    """State shared by calls alike: what their handshakes say, the rows that each shard had by these, if there
    was one, the whole call, and its exchange. `kept` are objects whose ids say that calls are alike."""

    words: list[int]
    rows: Held | None
    call: Call
    method: str
    kept: Any


_plans: dict[Any, Plan] = {}


class _OtherRows(Exception):
    """Shards have other rows than those of the call like this one."""


def run(
    q: Any, k: Any, v: Any, options: Options, form: Form, ranks: Ranks, where: Where
) -> tuple[Bound, Tensor, Tensor]:
    """One call of this rank: what it was, out and lse, both (batch, heads, rows, ...). A call like an earlier
    one has its plan while its handshake is under way."""
    try:
        checked(where, ranks)
        part = part_of(q, k, v, options, form)
        key = _likeness(part, ranks, where)
        plan = None if key is None else _plans.get(key)
        words = _words(part, where, form) if plan is None else plan.words
    except (SpecError, UnsupportedError) as error:
        if where.handshake is not False:
            ranks.meet(words_of({"refused": 1}), error)()
        raise
    met = ranks.meet(words) if where.handshake else None
    if plan is None:
        plan = _planned(part, ranks, where, words, key, met and met())
        agreed: Agreed = nothing
    elif met is None:
        agreed = nothing
    else:
        known = plan.rows

        def agreed() -> None:
            if (now := met()) != known:
                raise _OtherRows(now)

    try:
        out, lse = _exchanged(part, plan, ranks, agreed)
    except _OtherRows as other:
        plan = _planned(part, ranks, where, words, key, other.args[0])
        out, lse = _exchanged(part, plan, ranks, nothing)
    return part.bound, codec.rotate(out) if part.rotated else out, lse


def _words(part: Part, where: Where, form: Form) -> list[int]:
    """A rank's words about a call."""
    bound = part.bound
    said = said_of(bound.q, bound.k, bound.v, bound.args) | {"order": ORDERS.index(where.order)}
    said["codes"] = zlib.crc32(repr(part.forms).encode()) if any(part.forms) else 0
    said["method"] = METHODS.index(where.method or METHODS[0])
    said["function"] = KINDS.index("attention_varlen" if form is Form.PACKED else "attention")
    if where.seqlens is None and where.handshake is False and form is not Form.PACKED:
        change = "Give the rows of q and of k on all ranks together: the handshake would count them."
        raise spec_error("seqlens", "None", "two ints beside handshake=False", change)
    return words_of(said)


def _planned(part: Part, ranks: Ranks, where: Where, words: list[int], key: Any, rows: Held | None) -> Plan:
    """The plan of a call whose shards have so many rows, as far as a handshake told them; kept by its key."""
    call = whole_call(part, ranks, where, rows)
    method = where.method or method_of(part.bound, call)[0]
    if method == "all_gather":
        call = replace(call, gathers=True)
    tensors = [x for x in part.bound.args if isinstance(x, Tensor)]
    plan = Plan(words, rows, call, method, (ranks, tensors))
    if key is not None:
        if len(_plans) >= _MOST_KNOWN:
            _plans.clear()
        _plans[key] = plan
    return plan


def bounded(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Lengths of packed members."""
    return lengths_of(cu_seqlens.tolist())


def _likeness(part: Part, ranks: Ranks, where: Where) -> Any:
    """Key of calls that are planned alike, as those of layers are: of the same sizes, with the same tensors
    as arguments, unchanged, on a device. None: there is none."""
    q, k, v, form, args, _ = part.bound
    tensors = [x for x in args if isinstance(x, Tensor)]
    small = sum(x.numel() for x in tensors) <= _MOST_NUMBERS
    if not small or any(x.is_inference() or x.requires_grad or x.is_cpu for x in tensors):
        return None
    numbers = tuple((id(x), x._version) if isinstance(x, Tensor) else x for x in args)
    tracked = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    sizes = q.shape, k.shape, v.shape, q.dtype, q.device, form, tracked
    where = where._replace(seqlens=where.seqlens and tuple(where.seqlens))
    return numbers, sizes, where, part.forms, id(ranks.ring), id(ranks.heads)


def whole_call(part: Part, ranks: Ranks, where: Where, rows: Held | None) -> Call:
    """The whole call that this is a part of, checked. `rows` of q and of k are those of each shard, as far as
    a handshake told them."""
    q, k, v, _, args, _ = part.bound
    if args.cu_seqlens_q is not None and args.cu_seqlens_k is not None:
        lengths = [read_once(bounded, x) for x in (args.cu_seqlens_q, args.cu_seqlens_k)]
    else:
        lengths = [(n,) for n in where.seqlens or map(sum, (rows or ())[:2])]
    shards = [Shards(each, ranks.ring.size, where.order, ranks.pieces) for each in lengths]
    for i, (name, x, whole) in enumerate(zip("qk", (q, k), shards, strict=True)):
        wanted = [replace(whole, pieces=1).held(shard) for shard in range(whole.count)]
        got = wanted if rows is None else rows[i]
        if got == wanted:  # else every rank knows
            got, wanted = [x.shape[2]], [whole.held(ranks.rank)]
        if got != wanted:
            change = "Shards are made by polyflash.parallel.split()."
            raise spec_error(f"{name} rows", got, f"{wanted}, of {whole.rows} in {where.order} order", change)
    full = [
        x.new_empty(()).expand(*x.shape[:2], n.rows, x.shape[3])
        for x, n in zip((q, k, v), (shards[0], shards[1], shards[1]), strict=True)
    ]
    torch_ops.check(full[0], full[1], full[2], args)
    if validate.has_contents(args):
        args = validate.checked_contents(args, full[0], full[1])
    base = _base(args, shards[0], shards[1])
    sight = _sight(args, base, len(lengths[0]))
    at = None if isinstance(base, int) else base
    known: dict[str, Any] = {"num_q_heads": q.shape[1], "forms": part.forms, "alone": q.shape[0] == 1}
    return Call(ranks.ring, args, shards[0], shards[1], sight, at, **known)


def _base(args: Arguments, q: Shards, k: Shards) -> int | Tensor:
    """The position of row 0: one int, or int64 per request or member."""
    if args.q_offset is not None:
        return args.q_offset.long()
    if args.offset is not None:
        return args.offset
    if args.kv_lens is None and args.cu_seqlens_q is None:
        return k.rows - q.rows
    rows = torch.tensor(q.lengths)
    if args.kv_lens is not None:
        return args.kv_lens.long() - rows.to(args.kv_lens.device)
    return torch.tensor(k.lengths) - rows


def _sight(args: Arguments, base: int | Tensor, members: int) -> Sight:
    """The host's knowledge of who sees whom."""
    offsets: tuple[int, ...] | None = None
    if isinstance(base, int):
        offsets = (base,) * members
    elif base.device.type == "cpu":
        known = base.tolist()
        alike = args.cu_seqlens_q is not None or len(set(known)) == 1
        offsets = tuple(known[:members]) if alike else None
    right = 0 if args.causal else args.window_right
    segments = None
    if args.q_segments is not None and args.k_segments is not None:
        segments = _segments(args.q_segments, args.k_segments)
    lists = None if args.intervals is None else read_once(lists_of, args.intervals)
    moved = (
        lists,
        args.mask,
        args.bias,
        args.alibi_slopes,
        args.kv_lens,
        args.kv_starts,
        segments,
        args.dropout_p or None,
    )
    return Sight(
        args.window_left, right, offsets, segments, all(x is None for x in moved), lists, args.interval_rows
    )


def _segments(q_ids: Tensor, k_ids: Tensor) -> Segments:
    """Ids on the host."""
    return read_once(lambda *ids: Segments(*(x.numpy(force=True).copy() for x in ids)), q_ids, k_ids)  # type: ignore[no-any-return]


def lists_of(intervals: Tensor) -> Lists:
    """From which key on, up to which one, row blocks see some, of any entry and head; on the host."""
    blocks = intervals.numpy(force=True).astype(np.int64).transpose(4, 2, 0, 1, 3)
    starts, ends = blocks.reshape(2, intervals.shape[2], -1)
    some, far = starts < ends, np.iinfo(np.int64).max
    return Lists(np.where(some, starts, far).min(1, initial=far), np.where(some, ends, 0).max(1, initial=0))


def read_once(read: Callable[..., Any], *tensors: Tensor) -> Any:
    """read(*tensors), or what it returned for these very tensors lately: reading a device waits for it."""
    if any(x.is_inference() for x in tensors):
        return read(*tensors)
    key = tuple(y for x in tensors for y in (x, x._version))
    for kept, value in _read:
        if len(kept) == len(key) and all(
            a is b or (type(a) is int and a == b) for a, b in zip(kept, key, strict=True)
        ):
            return value
    _read[_MOST_READ - 1 :] = []
    _read.insert(0, (key, read(*tensors)))
    return _read[0][1]


def method_of(bound: Bound, call: Call) -> tuple[str, str]:
    """The exchange of a call that names none, and why."""
    if call.q.pieces > 1:
        return "ulysses+ring", "the mesh has two dimensions"
    return chosen(problem_of(bound, call))


def problem_of(bound: Bound, call: Call) -> Problem:
    q, k, v = bound.q, bound.k, bound.v
    sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size()
    widths = zip((k, v), call.forms, strict=True)
    sent = sum(x.shape[3] * x.element_size() if rows is None else rows.bytes for x, rows in widths)
    rates = RATES["cpu" if q.device.type == "cpu" else "cuda"]
    return Problem(call.q, call.k, call.sight, *sizes, rates, bytes_per_head=sent)


def _exchanged(part: Part, plan: Plan, ranks: Ranks, agreed: Agreed) -> tuple[Tensor, Tensor]:
    """The results of this rank's rows; nothing is sent before the ranks have `agreed`."""
    q, (k, v), call = part.bound.q, part.travel, plan.call
    number = 0 if plan.rows is None else ranks.ring.calls
    if not plan.method.startswith("ulysses"):
        return Attention.apply(q, k, v, call.args.bias, call.args.sinks, call, agreed, number)  # type: ignore[no-any-return]
    agreed()
    team = ranks.heads or ranks.ring
    of_q, of_k = ulysses.deal(q.shape[1], k.shape[1], team.size)
    first = ranks.ring.rank * team.size if ranks.heads else 0
    rows, keys = ([x.held(first + i) for i in range(team.size)] for x in (call.q, call.k))
    order = (None, None) if ranks.heads else (call.q, call.k)
    turns = [
        ulysses.Turn(team, dealt, held, shards, call.packed)
        for dealt, held, shards in ((of_q, rows, order[0]), (of_k, keys, order[1]))
    ]
    q, k, v = (ulysses.to_heads(x, turns[i > 0]) for i, x in enumerate((q, k, v)))
    own = of_q[team.rank]
    own_heads = slice(own[0], own[-1] + 1) if own else slice(0, 0)
    call = replace(call, args=of_heads(call.args, own_heads), first_head=own_heads.start)
    if ranks.heads:
        shards = replace(call.q, pieces=1), replace(call.k, pieces=1)
        call = replace(call, q=shards[0], k=shards[1])
        out, lse = Attention.apply(q, k, v, call.args.bias, call.args.sinks, call, nothing, number)
    else:
        args = call.args._replace(need_lse=True)
        if call.packed:
            longest = [max(x.lengths, default=0) for x in (call.q, call.k)]
            args = args._replace(max_seqlen_q=longest[0], max_seqlen_k=longest[1])
        if args.dropout_p:
            args = args._replace(dropout_head=call.first_head, dropout_heads=call.num_q_heads)
        k, v = values_of(k, call.forms[0]), values_of(v, call.forms[1])
        out, lse = torch_ops.call(q, k, v, args)
    return ulysses.to_rows(out, turns[0]), ulysses.to_rows(lse.unsqueeze(-1), turns[0]).squeeze(-1)
