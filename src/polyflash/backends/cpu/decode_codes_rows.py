"""Keys and values as codes of any scheme: rows of a block are decoded into float32, just before the walk of
decode_few.py reads them. Memory is read as codes; what they become stays in the first levels of the cache.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.code_rows import CodeRows
from polyflash.backends.cpu.configs import STORAGE_BYTES
from polyflash.backends.cpu.decode_blocks import DecodeTile
from polyflash.backends.cpu.decode_codes import entries
from polyflash.backends.cpu.decode_codes_configs import DecodedKey
from polyflash.backends.cpu.decode_units import Later
from polyflash.backends.cpu.intrinsics import least, quotient, stage, word
from polyflash.backends.cpu.simd import I32, Emitter, Value
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import DECODE, K_BATCH, V_BATCH
from polyflash.quant.scheme import Codes

device = Blocks(DECODE).device

ROWS_AHEAD = 64  # of K or V, whose codes are prefetched


class DecodedTile(CodeRows, DecodeTile):
    """Emissions for one key: the stages of float32 rows, and those that decode them."""

    def __init__(self, key: DecodedKey) -> None:
        super().__init__(key.walked)
        self.coded = key

    @stage
    def load_query(self, e: Emitter, src: Value, channels: Value, dst: Value, sign: Value) -> None:
        flip, storage = e.splat(e.b.trunc(sign, I32)), self.coded.storage
        kind = e.vf if storage == "float32" else e.vh

        def vector(p: list[Value], inside: Value | None) -> list[Value]:
            x = e.widen(e.load(p[0], 0, kind, inside), storage)
            e.store(e.b.xor(e.b.bitcast(x, e.vi), flip), p[1])
            return [e.at(p[0], self.lanes * STORAGE_BYTES[storage]), e.at(p[1], self.rows * e.bytes)]

        e.each_vector(channels, self.lanes, [e.pointer(src), e.pointer(dst)], vector)

    @stage
    def store_row(self, e: Emitter, o, stats, dst, channels) -> None:
        divided, storage = self._divided(e, stats), self.coded.storage

        def vector(p: list[Value], inside: Value | None) -> list[Value]:
            e.store(e.narrow(divided(e.load(p[0])), storage), p[1], inside=inside)
            return [e.at(p[0], self.rows * e.bytes), e.at(p[1], self.lanes * STORAGE_BYTES[storage])]

        e.each_vector(channels, self.lanes, [e.pointer(o), e.pointer(dst)], vector)

    def _prefetch(self, e: Emitter, later: Later, at: Value, units: int, spread: Value | None) -> None:
        """Decoded rows are near."""

    @stage
    def decode_keys(
        self, e: Emitter, src, step, count, dst, width, scale, scale_step, shift, shift_step, ahead
    ) -> None:
        """At `dst` `count` rows of K as float32, `width` bytes apart. Codes, scales and shifts of a row are
        `*step` bytes behind those of the row before; rows of codes from `ahead` on are prefetched."""
        places = (src, step), (dst, width), (scale, scale_step), (shift, shift_step), (ahead, step)
        self.decode(e, self.coded.k, self.coded.head_dim, count, places)

    @stage
    def decode_values(
        self, e: Emitter, src, step, count, dst, width, scale, scale_step, shift, shift_step, ahead
    ) -> None:
        """The same of V."""
        places = (src, step), (dst, width), (scale, scale_step), (shift, shift_step), (ahead, step)
        self.decode(e, self.coded.v, self.coded.head_dim_v, count, places)


def listers(key: DecodedKey, stage: Any, row_at: Any) -> tuple[Any, Any]:
    """Two device functions, `list_rows` and `next_head` of decode_few.py for rows that are decoded."""
    STEP = configs.STEP
    entry_at = entries()

    def of(tensor: int, codes: Codes, tables: tuple[int, int], decode: Any) -> Any:
        SCALE, SHIFT, SHIFTED = *tables, codes.shift is not None
        TOKENS, SHIFT_TOKENS = codes.scale.tokens, 0 if codes.shift is None else codes.shift.tokens
        IS_V = tensor == V_BATCH

        @device
        def end_of_run(tile, j, last):
            """The keys from j on up to here lie in one page, and share scales unless each has its own."""
            args, begin = tile.args, 0
            if args.page_table != 0:
                begin = quotient(j, args.page_size) * args.page_size
                last = least(last, begin + args.page_size)
            if TOKENS > 1:
                last = least(last, begin + ((j - begin) // TOKENS + 1) * TOKENS)
            if SHIFT_TOKENS > 1:
                last = least(last, begin + ((j - begin) // SHIFT_TOKENS + 1) * SHIFT_TOKENS)
            return last

        @device
        def list_head(tile, src, dst, first, last, i_h):
            args, zero, width = tile.args, tile.zero, tile.args.gathered_row
            page_stride, row_stride = word(args, tensor), word(args, tensor + 2)
            src += i_h * word(args, tensor + 1)
            scale_step = shift_step = 0
            if TOKENS == 1:
                scale_step = word(args, SCALE + 3)
            if SHIFT_TOKENS == 1:
                shift_step = word(args, SHIFT + 3)
            rows = tile.stage
            if IS_V:
                rows += args.block_n * width
            stage.fill_addresses(dst, zero, 0, first % STEP)
            dst += (first % STEP) * 8
            j = first
            while j < last:
                end = end_of_run(tile, j, last)
                row, at = row_at(tile, src, page_stride, row_stride, j), rows + (j - first) * width
                step = width
                if row == 0:
                    at, step = zero, 0
                else:
                    later = least(j + ROWS_AHEAD, tile.item.live - 1)
                    ahead = row_at(tile, src, page_stride, row_stride, later)
                    shift = scale = entry_at(tile, SCALE, TOKENS, j, i_h)
                    if SHIFTED:
                        shift = entry_at(tile, SHIFT, SHIFT_TOKENS, j, i_h)
                    decode(row, row_stride, end - j, at, width, scale, scale_step, shift, shift_step, ahead)
                stage.fill_addresses(dst + (j - first) * 8, at, step, end - j)
                j = end
            stage.fill_addresses(dst + (last - first) * 8, zero, 0, -last % STEP)

        return list_head

    list_keys = of(K_BATCH, key.k, (DECODE.k_scale, DECODE.k_shift), stage.decode_keys)
    list_values = of(V_BATCH, key.v, (DECODE.v_scale, DECODE.v_shift), stage.decode_values)

    @device
    def next_head(tile, src, tensor, dst, first, last, i_h):
        if tensor == V_BATCH:
            list_values(tile, src, dst, first, last, i_h)
        else:
            list_keys(tile, src, dst, first, last, i_h)

    @device
    def list_rows(tile, src, tensor, dst, first, last):
        next_head(tile, src, tensor, dst, first, last, 0)

    return list_rows, next_head
