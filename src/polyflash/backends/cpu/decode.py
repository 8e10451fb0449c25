"""Decode on the CPU: few query rows against many keys, split over threads. The kernels: decode_few.py for at
most 8 rows of a kv head, or of codes in tiles of 8; decode_many.py for more.

Bits depend on neither a request's neighbours nor the number of threads: a split is a fixed number of keys
wherever it lies, and the splits of a row are merged in order.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyflash.backends.cpu import (
    arguments,
    configs,
    decode_codes_configs,
    decode_configs,
    decode_many_configs,
    pool,
    runtime,
)
from polyflash.backends.cpu.configs import LINE, Scratch
from polyflash.backends.cpu.decode_configs import MOST_HEADS, WIDTH, DecodeConfig
from polyflash.backends.cpu.words import DECODE, Cut, Entry
from polyflash.spec import DECODE_ROWS, Arguments, AttentionSpec
from polyflash.target import Target

if TYPE_CHECKING:
    from polyflash.plan import Launch

BYTES_PER_US = 16_000  # that one core reads: what the thread decision assumes
KEPT_PARTIALS = 64 << 20  # bytes a thread keeps between its calls
ITEMS_PER_THREAD = 8  # at least, before an item takes several kv heads
LONG_PAGE = 128  # tokens, from which on the heads of a page are walked one by one where each lies together
MOST_SPLITS = 8  # of an item: what is read next is prefetched across their borders


class _Cut(NamedTuple):
    """State shared by calls of one tile size: kernel, keys of a split, tiles per kv head, scratch, words."""

    kernel: int
    split_keys: int
    chunks: int
    scratch_bytes: int
    partial_bytes: int
    words: bytes  # of Cut and Scratch
    widths: tuple[int, int, int]  # q_tile, gathered_row, zero_vectors of `Decode`
    items_per_thread: int  # at least, if an item can walk several kv heads and splits; else 0
    turns: bool  # and read their keys side by side


class Walks(NamedTuple):
    """The splits of a call: of every request `length` from `first` on, or of each its own."""

    first: int
    length: int
    splits: int  # of all requests
    each: list[tuple[int, int, int]] | None = None  # (request, first split, number of splits)


class _Memory:
    """`size` bytes from `address` on, which is that of a cache line."""

    __slots__ = ("_whole", "address", "size")

    def __init__(self, size: int) -> None:
        self._whole = torch.empty(size + LINE, dtype=torch.uint8, device="cpu")
        self.address, self.size = -(-self._whole.data_ptr() // LINE) * LINE, size


class _Kept(threading.local):
    """The calling thread's memory for partial results."""

    partials: _Memory | None = None


_kept = _Kept()


class Prepared:
    """A route's memory between calls. Entries are only added, so Python threads may share it."""

    __slots__ = ("config", "cuts", "spec")

    def __init__(self, config: DecodeConfig, spec: AttentionSpec, target: Target) -> None:
        configs.check_fits(config, spec, target)
        self.config, self.spec = config, spec
        self.cuts: dict[int, _Cut] = {}

    def cut(self, rows: int) -> _Cut:
        """For `rows` rows of a kv head."""
        found = self.cuts.get(rows)
        if found is None:
            few = rows <= DECODE_ROWS or self.spec.codes
            found = self.cuts[rows] = self._few(rows) if few else self._many(rows)
        return found

    def _few(self, rows: int) -> _Cut:
        spec, config = self.spec, self.config
        key: decode_configs.DecodeKey
        if spec.codes:
            key = decode_codes_configs.key_for(config, spec, rows)
            tiles = decode_codes_configs.scratch(key, config.block_n)
        else:
            key = decode_configs.key_for(config, spec.dtype, rows)
            tiles = decode_configs.scratch(key, spec.head_dim, spec.head_dim_v, config.block_n)
        chunks = -(-rows // key.rows)
        words = _tile_words(config, chunks, 0, tiles)
        partial_bytes = key.partial_bytes(spec.head_dim_v)
        zero_vectors = (tiles.gather - tiles.zero) // (4 * key.lanes)
        widths = (tiles.o - tiles.q) // MOST_HEADS, tiles.bad - tiles.gather, zero_vectors
        turns = key.rows <= decode_configs.MOST_TURN_ROWS and not spec.codes
        sizes = config.split_keys, chunks, tiles.total, partial_bytes
        # Threads end half an item apart; items begin slowly: docs/results/2026-11-29-xeon-decode-fours.md
        items = ITEMS_PER_THREAD if type(key) is decode_codes_configs.CodesKey else 2 * ITEMS_PER_THREAD
        return _Cut(runtime.load(key), *sizes, words, widths, items, turns)

    def _many(self, rows: int) -> _Cut:
        spec, config = self.spec, self.config
        nv, panels, chunks = decode_many_configs.shape(config.isa, rows)
        widest = max(spec.head_dim, spec.head_dim_v)
        key = decode_many_configs.key_for(config, spec.dtype, widest, nv)
        tiles = decode_many_configs.scratch(key, panels, config.block_n)
        words = _tile_words(config, chunks, panels, tiles)
        sizes = config.split_keys, chunks, tiles.total, key.partial_bytes(panels, spec.head_dim_v)
        return _Cut(runtime.load(key), *sizes, words, (0, 0, 0), 0, False)


def _tile_words(config: DecodeConfig, chunks: int, panels: int, tiles: Scratch) -> bytes:
    """Cut and Scratch; `lay` fills in the heads of an item."""
    blocks = Cut(config.block_n, heads=0, chunks=chunks, row_panels=panels, row_blocks=0, others=0, zero=0)
    return array("q", (*blocks, *tiles[:-1])).tobytes()


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fill `out` and, if asked for, `lse`. Sizes are positive; the argument block is this call's own."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch.config, launch.spec, launch.target)
    batch, num_q_heads, seqlen_q, _ = q.shape
    cut = prepared.cut(num_q_heads // v.shape[1] * seqlen_q)
    seqlen_k = v.shape[2] if args.page_table is None else v.shape[2] * args.page_table.shape[1]
    if args.kv_lens is args.kv_starts is args.q_offset is None:
        first, count = walk(args, seqlen_q, 0, seqlen_k, seqlen_k - seqlen_q, cut.split_keys)
        walks = Walks(first, count, batch * count)
    else:
        walks = _walks(args, range(batch), [seqlen_q] * batch, [seqlen_k] * batch, cut.split_keys)
    launched(cut, walks, q, k, v, out, lse, args)
    return out, lse


def repeat(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Any:
    """A runner for calls like this one, which has been made; None if they need the whole way."""
    from polyflash.backends.cpu import decode_repeat

    prepared: Prepared | None = launch.prepared
    return None if prepared is None else decode_repeat.made(prepared, q, k, v, args)


def of_members(
    prepared: Prepared, members: Any, lens_q: Any, lens_k: Any, group: int, args: Arguments
) -> tuple[_Cut, Walks]:
    """Prepares for `launched` the packed members of these numbers (int64 numpy), with so many rows and keys
    (of all members)."""
    cut = prepared.cut(group * int(lens_q[members].max()))
    return cut, _walks(args, members.tolist(), lens_q.tolist(), lens_k.tolist(), cut.split_keys)


def launched(
    cut: _Cut, walks: Walks, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> None:
    """Fill `out` and `lse` of the requests that `walks` are of."""
    kept: list[Any] = []
    frame = framed(cut, q, k, v, out, lse, args, kept)
    start(frame, frame.words, walks, v.shape[0] * v.shape[2], kept)


class Frame(NamedTuple):
    """The argument block of a call, and what decides how it is cut. What `lay` and `start` fill is 0."""

    words: array[int]
    cut: _Cut
    num_kv_heads: int
    apart: bool  # whether an item keeps to one kv head, as the keys of each lie together
    side_by_side: bool
    key_bytes: int  # of K and V of one key and kv head


def framed(
    cut: _Cut, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments, kept: list[Any]
) -> Frame:
    """Small tensors that must be copied first are put into `kept`, to live as long as the call."""
    scale = q.shape[3] ** -0.5 if args.scale is None else args.scale
    does = arguments.passes(args, scale)
    seqlen_k = v.shape[2] if args.page_table is None else v.shape[2] * args.page_table.shape[1]
    sinks = arguments.sinks_address(args.sinks, kept)
    head = arguments.head((q, k, v, out), lse.data_ptr(), seqlen_k, args, scale, does, sinks, 0)
    middle = arguments.NO_OPERANDS
    if does or arguments.any_table(args):
        middle = arguments.operands(args, scale, does, kept, 0, 0, k)
    bounds, (factor, cap) = args.row_bounds, arguments.decode_scaling(args, scale, does)
    row_bounds = (0, 0, 0) if bounds is None else (bounds.data_ptr(), *(4 * s for s in bounds.stride()))
    tables = chain(*arguments.tables(args, kept)) if args.codes else (0,) * 16
    tail = (cut.split_keys, *(0,) * 5, cut.partial_bytes, 0, factor, cap, *cut.widths, *row_bounds, 0, 0)
    block = array("q", head + middle + cut.words + array("q", (*tail, *tables)).tobytes())
    long_runs = args.page_table is None or k.shape[2] >= LONG_PAGE
    apart = not cut.items_per_thread or (long_runs and k.stride(1) >= k.stride(2))
    side_by_side = cut.turns and _side_by_side(args, k, v)
    key_bytes = k.shape[3] * k.element_size() + v.shape[3] * v.element_size()
    return Frame(block, cut, v.shape[1], apart, side_by_side, key_bytes)


class Laid(NamedTuple):
    """How the items of a call are shared, and memory that it wants besides: for `tiles` partial results."""

    items: int
    threads: int
    wake: bool
    tiles: int
    partial_bytes: int  # of each


def lay(
    frame: Frame, block: array[int], walks: Walks, most_keys: int, kept: list[Any], wanted: int = 0
) -> Laid:
    """Cuts a call into items and says so in its block; `most_keys` are there to read. `wanted`: torch's
    threads, if they are known."""
    cut, num_kv_heads, splits = frame.cut, frame.num_kv_heads, walks.splits
    keys = min(splits * cut.split_keys, most_keys)  # at most
    read_us = keys * num_kv_heads * frame.key_bytes // BYTES_PER_US
    threads = 1 if read_us < arguments.LEND_FROM_US else wanted or torch.get_num_threads()
    heads = 1 if frame.apart else _heads_per_item(num_kv_heads, splits, threads)
    tiles = -(-num_kv_heads // heads) * cut.chunks
    many = cut.items_per_thread
    together = _splits_per_item(splits * tiles, many * threads) if many else 1
    (block[DECODE.entries], block[DECODE.num_entries]), items = _table(walks, tiles, together, kept)
    block[DECODE.first_split], block[DECODE.num_splits] = walks.first, walks.length
    block[DECODE.heads], block[DECODE.splits_per_item] = heads, together
    block[DECODE.side_by_side] = frame.side_by_side and heads == MOST_HEADS
    apart = walks.each is not None or walks.length > 1 or heads > 1
    wake = read_us >= arguments.WAKE_FROM_US
    return Laid(items, threads, wake, splits * tiles if apart else 0, heads * cut.partial_bytes)


def start(frame: Frame, block: array[int], walks: Walks, most_keys: int, kept: list[Any]) -> None:
    """Runs the kernel on `block`, whose other words are those of the call; `most_keys` are there to read."""
    memory, cut = None, frame.cut
    items, threads, wake, tiles, size = lay(frame, block, walks, most_keys, kept)
    if tiles:
        memory, block[DECODE.done], block[DECODE.partials] = _partials(tiles, size)
    pool.run(cut.kernel, block.buffer_info()[0], items, threads, cut.scratch_bytes, wake)
    if memory is not None and memory.size <= KEPT_PARTIALS:
        _kept.partials = memory


def job(frame: Frame, block: array[int], walks: Walks, most_keys: int, further: Sequence[int]) -> pool.Job:
    """The job that `start` would run now, for calls at other addresses: of the first four words, and of the
    `further` ones with these numbers. No two requests of theirs differ."""
    wanted, block = torch.get_num_threads(), block[:]
    items, threads, wake, tiles, size = lay(frame, block, walks, most_keys, [], wanted)
    counters = -(-8 * tiles // LINE) * LINE
    at, memory = pool.room(8 * len(block) + LINE + counters + tiles * size)
    done = -(-(at + 8 * len(block)) // LINE) * LINE
    if tiles:
        block[DECODE.done], block[DECODE.partials] = done, done + counters
    ctypes.memmove(at, block.tobytes(), 8 * len(block))
    call = frame.cut.kernel, at, items, threads, frame.cut.scratch_bytes, wake
    return pool.job(memory, wanted, tiles // walks.length, done, further, *call)


def _heads_per_item(num_kv_heads: int, splits: int, threads: int) -> int:
    """kv heads that an item walks side by side: of short pages, and where the heads of a key lie together,
    all that leave items enough, so that memory is read in the order it lies. Changes no bit."""
    heads = min(num_kv_heads, MOST_HEADS)
    while heads > 1 and splits * -(-num_kv_heads // heads) < ITEMS_PER_THREAD * threads:
        heads = -(-heads // 2)
    return heads


def _side_by_side(args: Arguments, k: Tensor, v: Tensor) -> bool:
    """Whether keys are read with all heads of an item: from pages in which the heads of a key lie together.
    Longer runs of memory the machine reads ahead by itself, and then whole heads by turns are quicker."""
    compact = all(x.shape[3] == x.stride(1) == WIDTH and x.stride(3) == 1 for x in (k, v))
    return compact and args.page_table is not None and k.stride(1) < k.stride(2) and v.stride(1) < v.stride(2)


def _splits_per_item(splits: int, items: int) -> int:
    """Consecutive splits of a tile that an item walks, of `splits` in all: leaves so many items, if it can;
    changes no bit."""
    return max(1, min(MOST_SPLITS, splits // items))


def walk(args: Arguments, rows: int, start: int, live: int, offset: int, split_keys: int) -> tuple[int, int]:
    """First split and number of splits, at least 1, of what `rows` rows see of keys [start, live)."""
    left, right = arguments.window_sides(args)
    if args.offset is not None:
        offset = arguments.far_offset(args.offset)
    lo, hi = max(start, offset - left), min(live, rows + offset + right)
    if args.row_bounds is not None:
        lo, hi = max(lo, int(args.row_bounds[:, 0].min())), min(hi, int(args.row_bounds[:, 1].max()))
    return (lo // split_keys, -(-hi // split_keys) - lo // split_keys) if lo < hi else (0, 1)


def _walks(
    args: Arguments, requests: Iterable[int], lens_q: list[int], lens_k: list[int], split_keys: int
) -> Walks:
    """Finds each request's own."""
    lens, starts, offsets = (
        None if x is None else x.tolist() for x in (args.kv_lens, args.kv_starts, args.q_offset)
    )
    walks = []
    for b in requests:
        live = lens_k[b] if lens is None else lens[b]
        offset = live - lens_q[b] if offsets is None else offsets[b]
        start = 0 if starts is None else starts[b]
        walks.append((b, *walk(args, lens_q[b], start, live, offset, split_keys)))
    return unlike(walks)


def unlike(walks: list[tuple[int, int, int]]) -> Walks:
    return Walks(0, 0, sum(w[2] for w in walks), walks)


def _table(walks: Walks, tiles: int, together: int, kept: list[Any]) -> tuple[tuple[int, int], int]:
    """entries, num_entries and the number of items."""
    if walks.each is None:
        return (0, 0), walks.splits // walks.length * -(-walks.length // together) * tiles
    words, item, partial = array("q"), 0, 0
    for request, first, count in walks.each:
        words.extend(Entry(item, request, first, count, partial))
        item += -(-count // together) * tiles
        partial += count * tiles
    kept.append(words)
    return (words.buffer_info()[0], len(walks.each)), item


def _partials(tiles: int, size: int) -> tuple[_Memory, int, int]:
    """Memory, and the addresses in it of `tiles` words of zeros and of as many partial results of `size`
    bytes, each at a cache line. It is the caller's alone until put back: a finalizer may make a call, too."""
    counters = -(-8 * tiles // LINE) * LINE
    needed = counters + tiles * size
    memory, _kept.partials = _kept.partials, None
    if memory is None or memory.size < needed:
        memory = _Memory(needed)
    ctypes.memset(memory.address, 0, counters)
    return memory, memory.address, memory.address + counters
