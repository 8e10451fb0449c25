"""Decode on the CPU: few query rows against many keys, split over threads. The kernels: decode_few.py for at
most 8 rows of a kv head, decode_many.py for more.

Bits depend on neither a request's neighbours nor the number of threads: a split is a fixed number of keys
wherever it lies, and the splits of a row are merged in order.
"""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import configs, decode_configs, pool, runtime
from polyflash.backends.cpu.backward_arguments import tensor_words
from polyflash.backends.cpu.configs import LINE
from polyflash.backends.cpu.decode_arguments import scaling

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.cpu.decode_configs import DecodeConfig
    from polyflash.plan import Launch
    from polyflash.spec import Arguments, AttentionSpec
    from polyflash.target import Target

BYTES_PER_US = 16_000  # that one core reads: what the thread decision assumes
KEPT_PARTIALS = 64 << 20  # bytes a thread keeps between its calls


class _Cut(NamedTuple):
    """What calls of one tile size share: kernel, tiles per kv head, scratch, and words of the block."""

    kernel: int
    chunks: int
    scratch_bytes: int
    partial_bytes: int
    tail: tuple[int, ...]  # BLOCK_N to T_STAGED
    widths: tuple[int, int]  # GATHERED_ROW, ZERO_VECTORS


class _Kept(threading.local):
    """The calling thread's memory for partial results."""

    partials: Any = None


_kept = _Kept()


class Prepared:
    """What a route keeps between calls. Entries are only added, so Python threads may share it."""

    __slots__ = ("config", "cuts", "spec")

    def __init__(self, config: DecodeConfig, spec: AttentionSpec, target: Target) -> None:
        configs.check_fits(config, spec, target)
        self.config, self.spec = config, spec
        self.cuts: dict[int, _Cut] = {}

    def cut(self, rows: int) -> _Cut:
        """For `rows` rows of a kv head."""
        found = self.cuts.get(rows)
        if found is None:
            spec, config = self.spec, self.config
            key = decode_configs.key_for(config, spec.dtype, rows)
            tiles = decode_configs.scratch(key, spec.head_dim, spec.head_dim_v, config.block_n)
            chunks = -(-rows // key.rows)
            width = tiles.gather - tiles.zero
            found = self.cuts[rows] = _Cut(
                runtime.load(key), chunks, tiles.total, key.partial_bytes(spec.head_dim_v),
                (config.block_n, 0, chunks, 0, 0, 0, 0, *tiles[:-1]), (width, width // (4 * key.lanes)),
            )  # fmt: skip
        return found


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fill `out` and, if asked for, `lse`. Sizes are positive; the argument block is this call's own."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch.config, launch.spec, launch.target)
    batch, num_q_heads, seqlen_q, _ = q.shape
    num_kv_heads = v.shape[1]
    cut = prepared.cut(num_q_heads // num_kv_heads * seqlen_q)
    seqlen_k = v.shape[2] if args.page_table is None else v.shape[2] * args.page_table.shape[1]
    if args.kv_lens is args.kv_starts is args.q_offset is None:
        walk = _walk_of_all(args, seqlen_q, seqlen_k, prepared.config.split_keys)
        table, items = None, batch * num_kv_heads * cut.chunks * walk[1]
    else:
        lens_q, lens_k = np.full(batch, seqlen_q), np.full(batch, seqlen_k)
        table, items = _entries(
            args, np.arange(batch), lens_q, lens_k, prepared.config.split_keys, cut, num_kv_heads
        )
        walk = 0, 0
    _launch(cut, prepared.config, walk, table, items, q, k, v, out, lse, args)
    return out, lse


def run_members(
    prepared: Prepared, members: Any, lens_q: Any, lens_k: Any, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, args: Arguments,
) -> None:  # fmt: skip
    """The packed members of these numbers (int64 numpy) with so many rows and keys (of all members); at most
    DECODE_ROWS rows per kv head each."""
    num_kv_heads = v.shape[1]
    cut = prepared.cut(q.shape[1] // num_kv_heads * int(lens_q[members].max()))
    table, items = _entries(
        args, members, lens_q[members], lens_k[members], prepared.config.split_keys, cut, num_kv_heads
    )
    _launch(cut, prepared.config, (0, 0), table, items, q, k, v, out, lse, args)


def _launch(
    cut: _Cut, config: DecodeConfig, walk: tuple[int, int], table: Any, items: int,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments,
) -> None:  # fmt: skip
    """`table` says what the items are; without one, every request's splits are walk[0] .. sum(walk) - 1."""
    kept: list[Any] = [table]
    scale = q.shape[3] ** -0.5 if args.scale is None else args.scale
    does = a.passes(args, scale)
    left, right = a.window_sides(args)
    words = tensor_words(q, k, v, out, lse)
    if args.page_table is not None:
        words = (*words[: a.SEQLEN_K], v.shape[2] * args.page_table.shape[1], *words[a.SEQLEN_K + 1 :])
    head = a.pack_head(
        *words,
        *a.softmax_scale(scale, does),
        *(left, right, args.offset is not None, a.far_offset(args.offset)),
        a.sinks_address(args.sinks, kept),
        0,
    )
    middle = a.operands(args, scale, does, kept, 0, 0, k) if does or a.any_table(args) else a.NO_OPERANDS
    partials = done = 0
    alone = table is None and walk[1] == 1
    if not alone:
        kept.append(counters := np.zeros(items, np.int64))
        done, partials = counters.ctypes.data, _partials(items * cut.partial_bytes, kept)
    bounds = args.row_bounds
    tail = (
        *(*cut.tail, config.split_keys, *walk),
        *((0, 0) if table is None else (table.ctypes.data, len(table))),
        *(partials, cut.partial_bytes, done, *scaling(args, scale, does), *cut.widths),
        *((0, 0, 0) if bounds is None else (bounds.data_ptr(), *(4 * s for s in bounds.stride()))),
    )
    block = array("q", head + middle + array("q", tail).tobytes())
    read_us = items * config.split_keys * (q.shape[3] + v.shape[3]) * q.element_size() // BYTES_PER_US
    if table is None:
        read_us = min(
            read_us,
            k.shape[0]
            * k.shape[1]
            * k.shape[2]
            * (q.shape[3] + v.shape[3])
            * q.element_size()
            // BYTES_PER_US,
        )
    threads = 1 if read_us < a.LEND_FROM_US else torch.get_num_threads()
    pool.run(cut.kernel, block.buffer_info()[0], items, threads, cut.scratch_bytes, read_us >= a.WAKE_FROM_US)


def _walk_of_all(args: Arguments, seqlen_q: int, seqlen_k: int, split_keys: int) -> tuple[int, int]:
    """First split and number of splits of requests that are all alike."""
    left, right = a.window_sides(args)
    offset = seqlen_k - seqlen_q if args.offset is None else a.far_offset(args.offset)
    lo, hi = max(0, offset - left), min(seqlen_k, seqlen_q + offset + right)
    if args.row_bounds is not None:
        lo, hi = max(lo, int(args.row_bounds[:, 0].min())), min(hi, int(args.row_bounds[:, 1].max()))
    if hi <= lo:
        return 0, 1
    return lo // split_keys, -(-hi // split_keys) - lo // split_keys


def _entries(
    args: Arguments, requests: Any, lens_q: Any, lens_k: Any, split_keys: int, cut: _Cut, num_kv_heads: int
) -> tuple[Any, int]:
    """int64 (requests, 4), see decode_arguments.ENTRIES, and the number of items."""
    left, right = a.window_sides(args)
    live = lens_k if args.kv_lens is None else args.kv_lens.numpy()[requests].astype(np.int64)
    lo = np.zeros_like(live) if args.kv_starts is None else args.kv_starts.numpy()[requests].astype(np.int64)
    if args.q_offset is not None:
        offset = args.q_offset.numpy()[requests].astype(np.int64)
    else:
        offset = live - lens_q if args.offset is None else np.full_like(live, a.far_offset(args.offset))
    lo, hi = np.maximum(lo, offset - left), np.minimum(live, lens_q + offset + right)
    if args.row_bounds is not None:
        lo = np.maximum(lo, int(args.row_bounds[:, 0].min()))
        hi = np.minimum(hi, int(args.row_bounds[:, 1].max()))
    first = np.where(lo < hi, lo // split_keys, 0)
    count = np.where(lo < hi, -(-hi // split_keys) - first, 1)
    ends = np.cumsum(count) * (num_kv_heads * cut.chunks)
    begin = ends - count * (num_kv_heads * cut.chunks)
    table = np.stack([begin, requests, first, count], 1).astype(np.int64)
    return table, int(ends[-1])


def _partials(size: int, kept: list[Any]) -> int:
    """The address of `size` bytes, at a cache line, that live as long as `kept`."""
    memory = _kept.partials
    if memory is None or len(memory) < size + LINE:
        memory = np.empty(size + LINE, np.uint8)
        if size <= KEPT_PARTIALS:
            _kept.partials = memory
    kept.append(memory)
    return -(-memory.ctypes.data // LINE) * LINE
