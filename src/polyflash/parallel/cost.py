"""Costs of a call for its ranks, and which exchange suits it: arithmetic on shards, without a group.

    all_gather:  the first heads arrive before anything is computed, all others while it is
    ring:        each step takes as long as the longer of its exchange and its computation
    ulysses:     two exchanges, nothing behind which they hide

Between nodes every rank has a link of its own, slower than that within a node: a step of a ring from another
node takes the slow one, gathered keys come to a node once, over the links of all its ranks, and what goes
from all to all crosses for itself. A backward pass sends K and V again and their gradients in float32;
Ulysses sends what it sent. Rates of GPUs are those of two H100 of one host (`RATES`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from polyflash.parallel import joins, schedule
from polyflash.parallel.schedule import Shards, Sight
from polyflash.spec import Phase
from polyflash.work import flops_per_pair

MOST_GATHERED = 1 << 32  # bytes of K and V of one head and all ranks that a rank has room for
MOST_SHARDS = 64  # of which costs are looked at one by one
GATHERED_BYTES = 1 << 26  # of K and V of all ranks at a time: the next heads travel meanwhile
SUMMED, PER_ROW = 4, 16  # bytes of a channel of dq as kernels sum it, and of what else a row has there
FEW_SENT = 0.5  # a ring that sends less than this share of all keys beats every gathering


@dataclass(frozen=True)
class Link:
    """A rank's way to the others, and how fast it computes: bytes/s, seconds, FLOP/s; `far` bytes/s between
    nodes of `node` ranks each, 0 being one node."""

    bandwidth: float
    latency: float
    flops: float
    far: float = 0.0
    node: int = 0

    def between(self, rank: int, peer: int) -> float:
        """Bytes/s from one rank to another."""
        return self.far if self.node and rank // self.node != peer // self.node else self.bandwidth

    def outside(self, ranks: int) -> float:
        """The share of what comes from all other ranks that crosses nodes."""
        return max(0, ranks - self.node) / max(1, ranks - 1) if self.node else 0.0


# Of two H100 over NCCL (docs/results/2026-11-26-h100-x2-parallel.md): exchanges of 0.27 to 1.3 GB of both
# passes one by one, 158 to 199 GB/s, and what is left for no bytes; both passes of 32k and 128k causal tokens
# on one of them, 593 and 590 TFLOP/s. Gloo over a host's own memory: guessed.
RATES = {"cuda": Link(190e9, 25e-6, 590e12), "cpu": Link(1e9, 100e-6, 50e9)}


@dataclass(frozen=True)
class Problem:
    """One call, as all of its ranks see it. Sizes in elements, `itemsize` in bytes."""

    q: Shards
    k: Shards
    sight: Sight
    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    itemsize: int
    link: Link = RATES["cuda"]
    backward: bool = False
    bytes_per_head: int = 0  # of K and V of a position, as they travel; 0: values

    @property
    def shards(self) -> list[int]:
        """The shards to look at: all, or of very many the first, the last and two between."""
        n = self.q.count
        return list(range(n)) if n <= MOST_SHARDS else [i * (n - 1) // 3 for i in range(4)]

    @property
    def bytes_per_key(self) -> int:
        """K and V of one position, all heads."""
        each = self.bytes_per_head or (self.head_dim + self.head_dim_v) * self.itemsize
        return self.batch * self.num_kv_heads * each

    @property
    def flops_per_pair(self) -> float:
        phase = Phase.BACKWARD if self.backward else Phase.FORWARD
        per_head = flops_per_pair(phase, self.head_dim, self.head_dim_v)
        return per_head * self.batch * self.num_q_heads

    @property
    def sent_per_key(self) -> int:
        """Bytes that travel for one position: K and V, and in a backward pass their gradients."""
        return self.bytes_per_key + self.backward * self.bytes_per_key // self.itemsize * 4

    @property
    def stays(self) -> bool:
        """Do joined keys of two ranks stay for the backward pass, in which no keys are sent then?"""
        group = self.num_q_heads // max(1, self.num_kv_heads)
        return self.q.count == 2 and joins.stay(self.q, self.k, self.sight, self.batch == 1, group)

    def steps_of(self, rank: int) -> list[tuple[int, float]]:
        """Bytes that a rank of the ring sends in each step, and FLOPs that it computes, forward."""
        sent = self.sent_per_key - self.bytes_per_key * (self.backward and self.stays)
        return [
            (
                0 if t == 0 else step.lent.rows * sent,
                schedule.pairs_of(step.blocks, self.sight) * self.flops_per_pair,
            )
            for t, step in enumerate(schedule.steps(self.q, self.k, rank, self.sight))
        ]


@dataclass(frozen=True)
class Explanation:
    """The result of `polyflash.parallel.explain()`: the exchange, why, and what each rank sends and computes
    in the forward pass; of more than 64 shards, 4 stand for all. A backward pass sends K and V again, unless
    a note says that they stay, and their gradients in float32; it computes 2.5 times as much where
    head_dim_v = head_dim."""

    method: str
    why: str
    bytes_sent: tuple[int, ...]
    flops: tuple[float, ...]
    seconds: float  # of the slowest rank, by the rates of `problem.link`
    hidden: float  # share of the exchange's time behind computation
    peak_bytes: int  # K and V of other ranks that a rank holds at a time
    working_bytes: int  # all that both passes hold at most beside q, k, v and dout
    notes: tuple[str, ...] = field(default=())

    @property
    def imbalance(self) -> float:
        """FLOPs of the busiest rank over those of the mean one; 1 is balanced."""
        mean = sum(self.flops) / len(self.flops)
        return max(self.flops) / mean if mean else 1.0

    def __str__(self) -> str:
        sent = f"{min(self.bytes_sent):,} to {max(self.bytes_sent):,}"
        return "\n".join(
            (
                f"exchange: {self.method}: {self.why}",
                f"  bytes sent per rank, forward: {sent}; K and V of others held: {self.peak_bytes:,}",
                f"  held beside q, k, v and dout in both passes: up to {self.working_bytes:,} bytes",
                f"  FLOPs per rank, forward: up to {max(self.flops):.3g}, imbalance {self.imbalance:.2f}",
                f"  modelled: {self.seconds:.3g} s, {self.hidden:.0%} of the exchange behind computation",
                *(f"  note: {note}" for note in self.notes),
            )
        )


def both_passes(problem: Problem, method: str) -> tuple[Explanation, Explanation]:
    """The costs of a forward and of a backward pass."""
    return explained(problem, method, ""), explained(replace(problem, backward=True), method, "")


def explained(problem: Problem, method: str, why: str, notes: tuple[str, ...] = ()) -> Explanation:
    """The cost of a call by one exchange."""
    return _COSTS[method](problem, why, notes)


@lru_cache(maxsize=16)
def chosen(problem: Problem) -> tuple[str, str]:
    """The exchange for a call, and why."""
    ranks = problem.q.count
    if ranks == 1:
        return "ring", "there is one rank"
    ring = explained(problem, "ring", "")
    gather = explained(problem, "all_gather", "")
    share = max(ring.bytes_sent) / max(1, max(gather.bytes_sent))
    if share < FEW_SENT:
        return "ring", f"it sends {share:.0%} of the keys, as no row sees the others"
    head = problem.k.rows * problem.bytes_per_key // max(1, problem.num_kv_heads)
    if head > MOST_GATHERED:
        return "ring", f"one head's keys of all ranks are {head:,} bytes, more than {MOST_GATHERED:,}"
    times = f"{ring.seconds:.3g} s, all_gather {gather.seconds:.3g} s by the model"
    return ("ring" if ring.seconds < gather.seconds else "all_gather"), f"ring {times}"


def _rows(problem: Problem, rows: int, per_channel: float, per_row: int = 0) -> int:
    """Bytes of rows of all query heads: so many a channel, and so many a row beside them."""
    return int(rows * problem.batch * problem.num_q_heads * (problem.head_dim * per_channel + per_row))


def _extremes(count: int) -> set[int]:
    """The shards that need the most memory are among these: the ends, and the middle of the early chunks."""
    return {0, 1 % count, count // 2, count - 1}


def _of_out(problem: Problem, rows: int) -> int:
    """Bytes of out and lse."""
    return rows * problem.batch * problem.num_q_heads * (problem.head_dim_v * problem.itemsize + 4)


def _of_steps(problem: Problem) -> int:
    """Bytes of both passes of a ring, while a rank differentiates: out and lse; dq as a kernel sums it and
    hands it over, dk and dv; in a step of others' keys these, and the next ones; gradients of keys that are
    sent and come for the step before. Of two ranks dq of the other step as its kernel gave it; of more,
    float32 sums of dq, dk and dv."""
    most, size, of_key = 0, problem.itemsize, problem.bytes_per_key
    for rank in _extremes(problem.q.count):
        rows, keys = (x.held(rank * x.pieces) for x in (problem.q, problem.k))
        others = schedule.steps(problem.q, problem.k, rank, problem.sight)[1:]
        join = joins.join(problem.q, problem.k, rank, problem.sight, problem.batch == 1)
        if join is not None:
            most = max(most, _of_out(problem, rows) + _of_join(problem, join, others[0], (rows, keys)))
            continue
        sums = _rows(problem, rows, SUMMED) + keys * of_key // size * 4 if len(others) > 1 else 0
        busy = sent = kept = 0
        for t, step in enumerate(others):
            read = sum(block.q.span[1] - block.q.span[0] for block in step.blocks)
            following = others[t + 1].keys.rows if t + 1 < len(others) else 0
            made = _rows(problem, read, SUMMED + size, PER_ROW) + (2 * step.keys.rows + following) * of_key
            busy = max(busy, made + sent + (sums if t else 0))
            sent = (step.keys.rows + step.lent.rows) * of_key // size * 4
            kept = 0 if sums else _rows(problem, read, size)
        own = _rows(problem, rows, SUMMED + size, PER_ROW) + keys * of_key
        most = max(most, _of_out(problem, rows) + max(busy, own + sent + sums + kept))
    return most


def _of_join(problem: Problem, join: joins.Join, other: schedule.Step, held: tuple[int, int]) -> int:
    """Bytes beside out and lse of a rank of two that puts keys in order, while it differentiates what reads
    these; what own keys do alone, when gradients of the others are sent and come; or adds all up."""
    size, of_key = problem.itemsize, problem.bytes_per_key
    read, alone = (
        sum(end - start for start, end in (block.q.span for block in blocks))
        for blocks in (join.blocks, join.own.blocks)
    )
    keys_alone = sum(end - start for start, end in (block.k.span for block in join.own.blocks))
    joined, wide = join.keys * of_key, of_key // size * 4
    kept = _rows(problem, read, size) + joined
    made = _rows(problem, alone, SUMMED + size, PER_ROW) + keys_alone * of_key
    sent = (other.keys.rows + other.lent.rows) * wide
    added = kept + _rows(problem, alone + (held[0] if alone else 0), size)
    added += (keys_alone + held[1]) * of_key + other.lent.rows * wide
    later = max(kept + made + sent, added) + joined * problem.stays
    return max(joined + kept + max(_rows(problem, read, SUMMED, PER_ROW), sent), later)


def _of_gathering(problem: Problem, heads: int) -> int:
    """Bytes of both passes where so many heads are gathered at a time, while a block of rows is
    differentiated or gradients of its keys are sent and come: results; keys, and the next ones; dq as a
    kernel sums it and hands it over, and dk and dv of each block; float32 gradients of the heads before."""
    most, share = 0, heads / max(1, problem.num_kv_heads)
    at_once = int(problem.k.rows * problem.bytes_per_key * share)
    wide, turns = 2 * at_once // problem.itemsize * 4, -(-problem.num_kv_heads // heads)
    beside = (0, max(at_once, wide), at_once + wide)[min(turns, 3) - 1]
    for rank in _extremes(problem.q.count):
        rows, keys = (x.held(rank * x.pieces) for x in (problem.q, problem.k))
        total = _of_out(problem, rows) + _rows(problem, rows, problem.itemsize)
        total, parts, of_keys, busy = total + keys * problem.bytes_per_key + at_once, 0, 0, 0
        for block in schedule.blocks(problem.q, Shards(problem.k.lengths, 1), rank, 0, problem.sight):
            rows, keys = (end - start for start, end in (block.q.span, block.k.span))
            of_keys += int(keys * problem.bytes_per_key * share)
            parts += int(_rows(problem, rows, problem.itemsize) * share)
            sums = int(_rows(problem, rows, SUMMED, PER_ROW) * share)
            busy = max(busy, parts + of_keys + sums + beside)
        most = max(most, total + max(busy, of_keys + wide + (at_once if turns > 1 else 0)))
    return most


def _of_heads(problem: Problem, held: int) -> int:
    """Bytes of all rows of a rank's heads: q, k, v, out in either order of rows, their gradients, and dq as
    its kernel sums it."""
    rows = max(problem.q.held(rank * problem.q.pieces) for rank in problem.shards)
    each = problem.head_dim * (2 * problem.itemsize + 4) + 3 * problem.head_dim_v * problem.itemsize
    return rows * problem.batch * problem.num_q_heads * each + 2 * held


def _ring(problem: Problem, why: str, notes: tuple[str, ...]) -> Explanation:
    link, steps = problem.link, [problem.steps_of(rank) for rank in problem.shards]
    count = problem.q.count
    moving = [
        [
            link.latency + sent / link.between(rank, (rank + t) % count) if sent else 0.0
            for t, (sent, _) in enumerate(own)
        ]
        for rank, own in zip(problem.shards, steps, strict=True)
    ]
    working = [[flops / link.flops for _, flops in own] for own in steps]
    # The exchange of step t + 1 runs while step t is computed.
    seconds = [
        sum(max(a, b) for a, b in zip([*m[1:], 0.0], w, strict=True))
        for m, w in zip(moving, working, strict=True)
    ]
    behind = sum(
        min(a, b) for m, w in zip(moving, working, strict=True) for a, b in zip(m[1:], w[:-1], strict=True)
    )
    total = sum(map(sum, moving))
    most = max((sent for own in steps for sent, _ in own), default=0)
    sent = tuple(sum(x for x, _ in own) for own in steps)
    flops = tuple(sum(x for _, x in own) for own in steps)
    return Explanation(
        "ring",
        why,
        sent,
        flops,
        max(seconds),
        behind / total if total else 1.0,
        2 * most,
        _of_steps(problem),
        notes,
    )


def _work_of_rows(problem: Problem) -> tuple[float, ...]:
    """FLOPs of each rank, whose rows see their keys wherever these are."""
    return tuple(sum(flops for _, flops in problem.steps_of(rank)) for rank in problem.shards)


def _all_gather(problem: Problem, why: str, notes: tuple[str, ...]) -> Explanation:
    link, ranks = problem.link, problem.k.count
    most = max(problem.k.held(rank) for rank in problem.shards)
    sent, flops = (ranks - 1) * most * problem.sent_per_key, _work_of_rows(problem)
    crossing = sent * link.outside(ranks) / (link.far * link.node) if link.node else 0.0
    moving = link.latency + max(sent / link.bandwidth, crossing)
    working, first = max(flops) / link.flops, moving / max(1, problem.num_kv_heads)
    seconds = first + max(moving - first, working)
    hidden = min(moving - first, working) / moving
    held = problem.k.rows * problem.bytes_per_key
    head = held // max(1, problem.num_kv_heads)
    heads = max(1, min(problem.num_kv_heads, GATHERED_BYTES // max(1, head)))
    working = _of_gathering(problem, heads)
    return Explanation("all_gather", why, (sent,) * len(flops), flops, seconds, hidden, held, working, notes)


def _ulysses(problem: Problem, why: str, notes: tuple[str, ...]) -> Explanation:
    """Alone, or in front of a ring of as many shards as `problem` has, each held in pieces."""
    link, shards = problem.link, problem.q.count
    ranks = problem.q.pieces if problem.q.pieces > 1 else shards
    width, copies = problem.head_dim + problem.head_dim_v, max(problem.num_kv_heads, ranks)
    per_row = problem.batch * problem.num_q_heads * (width * problem.itemsize + 4)
    per_key = problem.batch * copies * width * problem.itemsize
    pieces = problem.q.pieces
    everyone = [shard * pieces + i for shard in problem.shards for i in range(pieces)]
    sizes = [problem.q.held(rank) * per_row + problem.k.held(rank) * per_key for rank in everyone]
    sent = tuple(size * (ranks - 1) // ranks for size in sizes)
    outside = link.outside(ranks) if pieces == 1 else 0.0
    crossing = max(sent) * outside / link.far if outside else 0.0
    seconds = 4 * link.latency + max(max(sent) * (1 - outside) / link.bandwidth, crossing)
    if pieces == 1:
        work = _work_of_rows(problem)
        flops = (sum(work) / len(work),) * len(work)
        seconds += flops[0] / link.flops
        held = problem.k.rows * per_key // ranks
        return Explanation("ulysses", why, sent, flops, seconds, 0.0, held, _of_heads(problem, held), notes)
    heads = problem.num_q_heads // ranks
    # The ranks of such a ring are one of each node, if there are nodes.
    ring_link = replace(link, bandwidth=link.far, node=0) if link.node else link
    own = replace(problem, num_q_heads=heads, num_kv_heads=max(1, copies // ranks), link=ring_link)
    ring = _ring(own, why, notes)
    sent = tuple(x + ring.bytes_sent[i // pieces] for i, x in enumerate(sent))
    flops = tuple(ring.flops[i // pieces] for i in range(len(sent)))
    held = ring.peak_bytes + problem.k.rows * per_key // (ranks * shards)
    working = ring.working_bytes + _of_heads(problem, held)
    return Explanation(
        "ulysses+ring", why, sent, flops, seconds + ring.seconds, ring.hidden, held, working, notes
    )


_COSTS: dict[str, Callable[[Problem, str, tuple[str, ...]], Explanation]] = {
    "ring": _ring,
    "all_gather": _all_gather,
    "ulysses": _ulysses,
    "ulysses+ring": _ulysses,
}
