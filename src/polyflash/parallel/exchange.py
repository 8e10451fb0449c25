"""One rank's part of a call: which keys it reads when, how they come, and where gradients of them go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyflash.arguments import int32_of
from polyflash.mask import FAR_OFFSET
from polyflash.parallel import joins, places, schedule, works
from polyflash.parallel.coded import Rows, values_of
from polyflash.parallel.comm import ALIGNED, ONE_MESSAGE, Team
from polyflash.parallel.cost import GATHERED_BYTES
from polyflash.parallel.handshake import Agreed
from polyflash.parallel.joins import Join
from polyflash.parallel.schedule import Block, Shards, Sight, Span, Step
from polyflash.parallel.sums import Sum, sums_of
from polyflash.parallel.works import Work, of_heads, tile, widened
from polyflash.spec import Arguments

NARROW = "narrow"  # of `Call.known`: has no gradient that this rank sent been more than one part of 16 bits?
_KEPT_BLOCKS = 256


class Source(NamedTuple):
    """Keys that are there, of `heads`, and the blocks that read them."""

    k: Tensor
    v: Tensor
    blocks: tuple[Block, ...]
    heads: Span
    step: Step | None = None
    join: Join | None = None  # what keys they are, if they were put in order


Piece = tuple[Callable[[], Callable[[], list[Tensor]]], Callable[[list[Tensor]], Source]]
"""Starts an exchange of K and V; what waits for it returns both as they travel; and makes them a source."""


@dataclass(frozen=True)
class Call:
    """One rank's part of a call: `args` are those of the whole of it, for the heads that this rank has.
    `base` is the position of row 0 where only the device knows it, int64 (batch or members,)."""

    team: Team
    args: Arguments
    q: Shards
    k: Shards
    sight: Sight
    base: Tensor | None = None
    first_head: int = 0  # of the query heads that this rank has, of `num_q_heads`
    num_q_heads: int = 0
    gathers: bool = False
    alone: bool = False  # is there one batch entry?
    forms: tuple[Rows | None, Rows | None] = (None, None)  # of codes that travel
    known: dict[Any, Any] = field(default_factory=dict, compare=False)  # works of blocks

    @property
    def packed(self) -> bool:
        """Are there packed members?"""
        return self.args.cu_seqlens_q is not None

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps of a ring."""
        return schedule.steps(self.q, self.k, self.team.rank, self.sight)

    @cached_property
    def join(self) -> Join | None:
        """How keys of two ranks are put in order, if they are."""
        return self._join(self.team.rank)

    def _join(self, rank: int) -> Join | None:
        return None if self.gathers else joins.join(self.q, self.k, rank, self.sight, self.alone)

    @cached_property
    def meets(self) -> bool:
        """Does one of two ranks wait for the keys of the other before it computes? Then the other does so
        too: on a GPU its kernels might leave no room for its half of the exchange until they end."""
        return self.team.size == 2 and not (self._join(0) is self._join(1) is None)

    def waits(self, k: Tensor) -> bool:
        """Is nothing computed before keys are exchanged?"""
        return self.meets and k.device.type != "cpu"

    def by_rows(self, k: Tensor) -> bool:
        """Do keys of a ring travel row by row, with all heads of each, and lie so when they are joined? Those
        of one entry then arrive where they are read, and gradients leave from where they were made."""
        return self.packed or (self.alone and self.waits(k))

    def keeps(self, q: Tensor, k: Tensor) -> bool:
        """Do joined keys stay for the backward pass instead of own ones? It exchanges no keys then."""
        key = "keeps", q.shape[1] // max(1, k.shape[1])
        if key not in self.known:  # Shards of many members take long to hash
            self.known[key] = self.meets and joins.stay(self.q, self.k, self.sight, self.alone, key[1])
        return self.known[key]  # type: ignore[no-any-return]

    @property
    def whole(self) -> bool:
        """Do rows see all their keys in one call?"""
        return self.gathers or self.join is not None

    def kept(self, q: Tensor) -> torch.dtype:
        """The dtype in which results are kept until they are whole: that of sums where any may be merged more
        than once."""
        if self.whole:
            return q.dtype
        once = self.args.sinks is None and sum(len(step.blocks) for step in self.steps) <= 2
        return widened(q).dtype if once else sums_of(q)  # type: ignore[no-any-return]

    def work(self, block: Block, heads: slice, device: torch.device) -> Work:
        """A block as calls take it: the masks as its rows, of these query heads, and its keys see them."""
        key = id(self.args), id(block), heads.start, heads.stop, self.gathers, self.first_head
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= _KEPT_BLOCKS:
                self.known.clear()
            made = Work(slice(*block.q.span), slice(*block.k.span), self._placed(block, heads, device))
            found = self.known[key] = made, (self.args, block)  # kept, for their ids
        return found[0]  # type: ignore[no-any-return]

    def _placed(self, block: Block, heads: slice, device: torch.device) -> Arguments:
        args = of_heads(self.args, heads)
        positional = args.alibi_slopes is not None
        own: dict[str, Any] = {"need_lse": True, "offset": None, "q_offset": None}
        own["sinks"] = args.sinks if self.whole else None
        if block.full:
            own |= {"causal": False, "window_left": None, "window_right": None}
        else:
            positional = positional or not (args.causal is args.window_left is args.window_right is None)
        if self.packed or len(block.q.lens) > 1:
            own |= places.packed_bounds(block, device)
        else:
            rows, seen = block.places
            own |= {name: tile(getattr(args, name), rows, seen) for name in ("mask", "bias")}
            if args.q_segments is not None and args.k_segments is not None:
                own |= {"q_segments": args.q_segments[:, rows], "k_segments": args.k_segments[:, seen]}
            if args.intervals is not None:
                own |= works.lists_of(args.intervals, args.interval_rows, rows, seen)
        for name in ("kv_lens", "kv_starts"):
            if (x := getattr(args, name)) is not None:
                first, keys = places.keys_of(block, x.device, self.packed)
                x = places.of_entries(block, x) if self.packed else x
                own[name] = torch.minimum((x.long() - first).clamp(min=0), keys).int()
        aligned = args.kv_lens is None and places.is_aligned(block, self.sight)
        if positional and not aligned:
            own |= self._position(block)
        if args.dropout_p:
            own |= {"dropout_row": int(block.q.starts[0]), "dropout_key": int(block.k.starts[0])}
            own |= {"dropout_head": self.first_head + heads.start, "dropout_heads": self.num_q_heads}
        return args._replace(**own)

    def _position(self, block: Block) -> dict[str, Any]:
        """The place of rows of a block among its keys."""
        if self.sight.offsets is None and self.base is not None:
            base = places.of_entries(block, self.base) if self.packed else self.base
            place = base + places.apart(block, base.device, self.packed)
            return {"q_offset": int32_of("q_offset", place, False)}
        if self.args.cu_seqlens_q is not None:
            return {"q_offset": places.offsets(block, self.sight, self.args.cu_seqlens_q.device)}
        at = (self.sight.offsets or (0,))[0] + int(block.q.starts[0] - block.k.starts[0])
        return {"offset": max(-FAR_OFFSET, min(at, FAR_OFFSET))}

    def sources(
        self, k: Tensor, v: Tensor, what: str, agreed: Agreed, mark: Any, joined: bool | None = None
    ) -> Iterator[Source]:
        """The keys that rows of this rank see, the next ones on their way while one is used, the first from
        when the ranks have `agreed`. Own keys of a ring come first; in a backward pass of several steps last,
        while gradients of a step before are on their way. `joined` is given in a backward pass: are k and v
        joined ones, for which nothing waits? `mark`: see `Team.beside`."""
        backward, there = joined is not None, bool(joined)
        own, pieces = self._gathers(k, v, what) if self.gathers else self._fetches(k, v, what, agreed, there)
        if self.gathers or not pieces:
            agreed()
        beside = mark if backward and pieces and not there else None
        with self.team.beside(beside):
            arriving = pieces[0][0]() if pieces else None
        if mark is not None and not backward and not self.meets:
            mark.record()
        last = backward and not self.whole and any(step.keys.rows for step in self.steps[1:])

        def arrived(first: bool) -> list[Tensor]:
            both: list[Tensor] = arriving()  # type: ignore[misc]
            if beside is not None and first:
                self.team.join(both)
            return both

        def follow() -> Iterator[Source]:
            nonlocal arriving
            early = arrived(True) if pieces and self.waits(k) else None
            if own is not None and not last:
                yield own
            for i, (_, source) in enumerate(pieces):
                both = arrived(i == 0) if early is None else early
                early = None
                arriving = pieces[i + 1][0]() if i + 1 < len(pieces) else None
                x = source(both)
                del both  # else it would be kept while x is used
                yield x._replace(k=values_of(x.k, self.forms[0]), v=values_of(x.v, self.forms[1]))
                del x
            if own is not None and last:
                yield own

        return follow()

    def _fetches(
        self, k: Tensor, v: Tensor, what: str, agreed: Agreed, there: bool
    ) -> tuple[Source, list[Piece]]:
        """Own keys of a ring, and the steps that bring others; `there`: k and v are joined ones."""
        steps, heads, join, joined = self.steps, (0, k.shape[1]), self.join, (k, v)
        if there and join is not None and join.mine is not None:
            k, v = (x[:, :, join.mine] for x in joined)

        by_rows, early = self.by_rows(k), join is not None and self.waits(k)

        def start(t: int) -> Callable[[], list[Tensor]]:
            step = steps[t]
            if there:
                return lambda: [places.wire(x[:, :, :0], by_rows) for x in joined]
            sends = [(step.reader, places.lent(x, step.lent, by_rows)) for x in (k, v)]
            rows, where, into = step.keys.rows, None, []
            if early and by_rows and self._sizes((k, v), rows) > ONE_MESSAGE:
                where = join.arriving  # type: ignore[union-attr]
            if where is None:
                into = rooms = self._rooms((k, v), rows, by_rows)
            else:
                rooms = self._rooms((k, v), join.keys, by_rows)  # type: ignore[union-attr]
                into = [x.narrow(1, where.at, rows) for x in rooms]
            if t == 1:
                agreed()
            wait = self.team.exchange(sends, [(step.owner, x) for x in into], f"{what}, step {t}")

            def come() -> list[Tensor]:
                laid: list[Tensor] = []
                if early and not by_rows:
                    laid = [places.laid(join.pieces, x) for x in (k, v)]  # type: ignore[union-attr]
                elif where is not None:
                    for x, room in zip((k, v), rooms, strict=True):
                        places.lay(join.pieces, x, True, places.wire(room, True))  # type: ignore[union-attr]
                wait()
                return [*rooms, *laid]

            return come

        def source(t: int, both: list[Tensor]) -> Source:
            if join is None:
                own_k, own_v = (places.wire(x, by_rows) for x in both)
                return Source(own_k, own_v, steps[t].blocks, heads, steps[t])
            k_all, v_all = joined
            if by_rows and both[0].shape[1] == join.keys:
                k_all, v_all = (places.wire(x, True) for x in both)
            elif not there:
                each = zip((k, v), both[:2], both[2:] or (None, None), strict=True)
                k_all, v_all = (places.joined(join.pieces, *x, by_rows) for x in each)
            return Source(k_all, v_all, join.blocks, heads, steps[t], join)

        first = steps[0] if join is None else join.own
        own = [k, v]
        if first.blocks:
            own = [values_of(x[:, :, first.keys.slice], self.forms[i]) for i, x in enumerate(own)]
        pieces: list[Piece] = [(partial(start, t), partial(source, t)) for t in range(1, len(steps))]
        return Source(own[0], own[1], first.blocks, heads, first), pieces

    def _sizes(self, likes: Sequence[Tensor], rows: int) -> int:
        """Bytes of so many rows of each."""
        return sum(prod(self._shape(x, rows, True)) * x.element_size() for x in likes)

    def _shape(self, like: Tensor, rows: int, by_rows: bool) -> tuple[int, ...]:
        """So many rows as they travel."""
        batch, heads, _, dim = like.shape
        return (batch, rows, heads, dim) if by_rows else (batch, heads, rows, dim)

    def _rooms(
        self, likes: Sequence[Tensor], rows: int, by_rows: bool, kind: torch.dtype | None = None
    ) -> list[Tensor]:
        """Room for so many rows of each as they travel, side by side in memory where they start aligned."""
        kinds, shapes = [kind or x.dtype for x in likes], [self._shape(x, rows, by_rows) for x in likes]
        sizes = [prod(shape) * each.itemsize for shape, each in zip(shapes, kinds, strict=True)]
        if any(size % ALIGNED for size in sizes):
            return [x.new_empty(s, dtype=t) for x, s, t in zip(likes, shapes, kinds, strict=True)]
        parts = likes[0].new_empty(sum(sizes), dtype=torch.uint8).split(sizes)
        return [x.view(t).view(shape) for x, t, shape in zip(parts, kinds, shapes, strict=True)]

    def _gathers(self, k: Tensor, v: Tensor, what: str) -> tuple[None, list[Piece]]:
        """Keys of all ranks, so many heads at a time."""
        found = schedule.blocks(self.q, Shards(self.k.lengths, 1), self.team.rank, 0, self.sight)
        missing = max(self.k.held(rank) for rank in range(self.team.size)) - k.shape[2]

        def start(heads: Span) -> Callable[[], list[Tensor]]:
            own = [x[:, slice(*heads)] for x in (k, v)]
            if missing:
                own = [torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in own]
            waits = [self.team.gather(places.wire(x, self.packed), what) for x in own]
            return lambda: [wait() for wait in waits]

        def source(heads: Span, both: list[Tensor]) -> Source:
            keys, values = (places.in_order(self.k, x.unbind(0), self.packed) for x in both)
            return Source(keys, values, found, heads)  # without padding

        return None, [(partial(start, x), partial(source, x)) for x in self.head_groups(k, v)]

    def give_back(
        self, source: Source, grads: Sequence[Sum | None], totals: Sequence[Sum | None], narrow: bool
    ) -> Callable[[], None] | None:
        """Hands gradients of keys to their owners; call the result, if there is one, for those that other
        ranks have for the keys of this one, which it adds to the totals. `narrow`: they travel as they are,
        else as float32 sums."""
        pairs = [
            (sent, total, like)
            for sent, total, like in zip(grads, totals, (source.k, source.v), strict=True)
            if sent is not None and total is not None
        ]
        what, step, owned = "returned gradients of keys", source.step, [total for _, total, _ in pairs]
        if step is None:
            waits = []
            for sent, _, like in pairs:
                parts = self._for_owners(sent, like)
                waits.append(self.team.swap(parts, [tuple(parts[self.team.rank].shape)] * len(parts), what))

            def added() -> None:
                for wait, total in zip(waits, owned, strict=True):
                    for part in wait():
                        total.add(places.wire(part, self.packed))
                    total.finish()

            return added
        if step.owner == self.team.rank:
            for sent, total, _ in pairs:
                sent.pour(total, source.heads[0], step.keys.first)
            return None
        if not pairs:
            return None
        self.known[NARROW] = self.known.get(NARROW, True) and all(sent.is_narrow for sent, _, _ in pairs)
        likes, kind = [like for _, _, like in pairs], source.k.dtype if narrow else sums_of(source.k)
        by_rows, rows = self.by_rows(source.k), step.keys.rows
        into = self._rooms(likes, step.lent.rows, by_rows, kind)
        spans = (joins.Piece(False, 0, 0, rows),) if source.join is None else source.join.pieces
        rooms: list[Tensor] = []
        if narrow and by_rows and self._sizes(likes, rows) > ONE_MESSAGE:
            at = [x.at for x in spans if not x.own]
            rooms = [x for sent, _, _ in pairs if len(at) == 1 and (x := sent.part(at[0], rows)) is not None]
        there = len(rooms) == len(pairs)
        rooms = rooms if there else self._rooms(likes, rows, by_rows, kind)
        for (sent, total, _), room in zip(pairs, rooms, strict=True):
            for own, at_row, first, count in spans:
                if own:
                    sent.pour(total, 0, first, (at_row, at_row + count))
                elif not there:
                    sent.read(places.wire(room, by_rows)[:, :, first : first + count], 0, at_row)
        sends = [(step.owner, places.wire(x, by_rows) if there else x) for x in rooms]
        wait = self.team.exchange(sends, [(step.reader, x) for x in into], what)

        def arrived() -> None:
            wait()
            for x, total in zip(into, owned, strict=True):
                for part, row in places.returned(x, step.lent, self.k.held(self.team.rank), by_rows):
                    total.add(part, 0, row)

        return arrived

    def _for_owners(self, sent: Sum, like: Tensor) -> list[Tensor]:
        """A sum of all keys in their order, cut for those who hold them."""
        if self.packed:
            whole = places.wire(
                like.new_empty(self._shape(like, like.shape[2], True), dtype=sums_of(like)), True
            )
            sent.read(whole)
            return places.of_shards(self.k, whole, True)
        parts = places.room_for(self.k, like, sums_of(like))
        for shard, part in enumerate(parts):
            for chunk in self.k.chunks(shard):
                sent.read(part[:, :, slice(*chunk.span)], 0, int(chunk.starts[0]))
        return parts

    def covers(self, source: Source, rows: int) -> bool:
        """Will each of so many rows have been written, from this source on, where none is written twice?"""
        blocks = source.blocks if self.join is None else (*self.join.own.blocks, *self.join.blocks)
        spans = [x.q.span for x in blocks]  # of packed members they may overlap
        return schedule.covers(spans[:1] if self.packed and self.gathers else spans, rows)

    def head_groups(self, k: Tensor, v: Tensor) -> list[Span]:
        """Heads of k to gather at a time: as many as `GATHERED_BYTES` has room for."""
        each = k.shape[0] * self.k.rows * (k.shape[3] + v.shape[3]) * k.element_size()
        n = max(1, GATHERED_BYTES // max(1, each))
        return [(h, min(h + n, k.shape[1])) for h in range(0, k.shape[1], n)]
