"""Device functions that every attention kernel of this engine shares: reading rows of any stride, and where
a batch entry's rows stand."""

from __future__ import annotations

import functools
from typing import Any

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import KernelKey
from polyflash.backends.cpu.intrinsics import greatest, least, load_i32, merged, namespace, word
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import FORWARD

device = Blocks(FORWARD).device


def loaders(key: KernelKey, stage: Any) -> Any:
    """For kernels of `key`'s storage: gathered, load_tile and `places`."""
    SIZE, K_BYTES = configs.STORAGE_BYTES[key.storage], key.loaded_row_bytes

    @device
    def gathered(scratch_row, src, stride, count):
        """Address at which the row at `src` can be read with unit stride."""
        if stride == SIZE:
            return src
        stage.gather_row(src, stride, count, scratch_row)
        return scratch_row

    @device
    def load_tile(tile, src, row_stride, dim_stride, rows, count, dst):
        """`rows` rows of `count` elements into scratch rows, zero up to a whole vector."""
        if dim_stride == SIZE:
            stage.load_rows(src, row_stride, rows, count, dst)
        else:
            row = tile.gather
            for r in range(rows):
                stage.gather_row(src + r * row_stride, dim_stride, count, row)
                stage.load_rows(row, 0, 1, count, dst + r * K_BYTES)

    return merged(places(), namespace(gathered, load_tile))


@functools.cache
def places() -> Any:
    """For all kernels: stand, key_rows, sink_bits."""
    KV_LENS, KV_STARTS, Q_OFFSET = FORWARD.kv_lens, FORWARD.kv_starts, FORWARD.q_offset

    @device
    def table_entry(args, table, i_b, default):
        """An entry of a table whose stride follows its address."""
        return (
            load_i32(word(args, table) + i_b * word(args, table + 1)) if word(args, table) != 0 else default
        )

    @device
    def stand(tile, i_b):
        """Place of batch entry, or packed member, `i_b`: index into the tensors, first row and key there,
        number of rows, first and end live key. The item's words for the pass are written."""
        args = tile.args
        i_t, first_q, first_k = i_b, 0, 0
        seqlen_q, seqlen_k = args.seqlen_q, args.seqlen_k
        # Bounds were checked before the call; clamped all the same, as another thread may write them.
        if args.cu_q != 0:
            cu_q = args.cu_q + 4 * i_b
            i_t, first_q = 0, least(greatest(load_i32(cu_q), 0), seqlen_q)
            seqlen_q = greatest(least(load_i32(cu_q + 4), seqlen_q) - first_q, 0)
        if args.cu_k != 0:
            cu_k = args.cu_k + 4 * i_b
            first_k = least(greatest(load_i32(cu_k), 0), seqlen_k)
            seqlen_k = greatest(least(load_i32(cu_k + 4), seqlen_k) - first_k, 0)
        live = least(greatest(table_entry(args, KV_LENS, i_b, seqlen_k), 0), seqlen_k)
        start = greatest(table_entry(args, KV_STARTS, i_b, 0), 0)
        offset = args.offset if args.has_offset != 0 else live - seqlen_q
        offset = table_entry(args, Q_OFFSET, i_b, offset)
        item = tile.item
        item.batch = i_b
        item.seqlen_k = seqlen_k
        item.offset = offset
        # Row i sees keys [max(start, i + lo_shift), min(live, i + hi_shift)); clamped, shifts fit 32 bits.
        lo_shift, hi_shift = offset - args.left, offset + args.right + 1
        item.lo_shift = least(greatest(lo_shift, -seqlen_q), seqlen_k)
        item.hi_shift = least(greatest(hi_shift, -seqlen_q), seqlen_k)
        return i_t, first_q, first_k, seqlen_q, start, live

    @device
    def key_rows(args, i_t, i_hkv, first_k):
        """Addresses of K and V of key 0 of a kv head; of pages, in page 0."""
        k = args.k + i_hkv * args.k_head
        v = args.v + i_hkv * args.v_head
        if args.page_table == 0:
            k += i_t * args.k_batch + first_k * args.k_row
            v += i_t * args.v_batch + first_k * args.v_row
        return k, v

    @device
    def sink_bits(args, head):
        """The sink of a query head; -inf if there is none."""
        return load_i32(args.sinks + 4 * head) if args.sinks != 0 else 0xFF800000

    return namespace(stand, key_rows, sink_bits)
