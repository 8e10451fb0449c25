"""The quantiser: values become codes, scales and shifts where they lie, group by group.

One work item is some heads of groups of tokens. What is new in a group is first copied behind what it had;
what is turned or rotated on its way goes through the scratch, a block at a time.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import intrinsics
from polyflash.backends.cpu.intrinsics import greatest, least
from polyflash.backends.cpu.quantize_blocks import QuantizeTile
from polyflash.backends.cpu.quantize_configs import QuantizeKey
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import GROUP, QUANTIZE

BLOCK = Blocks(QUANTIZE)
device = BLOCK.device
GROUP_BYTES = 8 * len(GROUP.words)


def build(key: QuantizeKey) -> Any:
    """Compile the quantiser of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    tile, group_at = QuantizeTile(key), BLOCK.words(GROUP)
    stage, SIZE, ROW_SIZE = intrinsics.stages(key, tile), tile.size, tile.row_size
    PACKED, BY_CHANNEL, ROTATED, ENTRY = key.packed, key.by_channel, key.rotated, tile.table_size

    @device
    def place_rows(args, src, dst, dst_step, rows, turn):
        """Copies values, turned by their positions if the call says so."""
        step, n = args.x_token, args.channels
        if args.cos == 0:
            stage.copy_rows(src, step, dst, dst_step, rows, n)
            return
        half, at = args.half, turn * args.half * 4
        if args.neighbours != 0:
            stage.turn_neighbours(src, step, dst, dst_step, rows, n, args.cos + at, args.sin + at, half)
        else:
            stage.turn_halves(src, step, dst, dst_step, rows, n, args.cos + at, args.sin + at, half)

    @device
    def encode_unit(args, number, head, part, scratch):
        """The blocks of a part of one group's tokens, of one head."""
        group = group_at(args.groups + number * GROUP_BYTES)
        x, live, block = args.values + group.source + head * args.x_head, group.live, args.block
        if group.tail != 0:
            src, x = x, group.tail + args.tails + head * args.x_head
            dst = x + group.first * args.x_token
            place_rows(args, src, dst, args.x_token, live - group.first, group.turn)
        codes = args.codes + group.codes + head * args.codes_head
        table, mean = group.table + head * args.table_head, args.mean
        if mean != 0:
            mean += (number * args.heads + head) * args.channels * 4
        first, last = part * args.part, least((part + 1) * args.part, (args.tokens + block - 1) // block)
        wide = args.channels if BY_CHANNEL else args.shared
        for i in range(first, last):
            row = i * block
            rows = least(block, args.tokens - row)
            there = least(greatest(live - row, 0), rows)
            kept = least(greatest(group.kept - row, 0), there)
            at, step, place = x + row * args.x_token, args.x_token, codes + row * args.codes_token
            if args.cos != 0 and group.tail == 0:
                place_rows(args, at, scratch + args.turned, args.channels * ROW_SIZE, there, group.turn + row)
                at, step = scratch + args.turned, args.channels * ROW_SIZE
            if ROTATED:
                stage.rotate_rows(at, step, scratch, there, args.channels, args.hadamard, args.factor)
                at, step = scratch, args.channels * SIZE
            scale = args.scale + table + i * args.table_block
            shift = args.shift + table + i * args.table_block
            for i_c in range((args.channels + wide - 1) // wide):
                c = i_c * wide
                n = least(wide, args.channels - c)
                m = mean + 4 * c if mean != 0 else 0
                stage.encode_block(
                    at + c * SIZE,
                    step,
                    kept,
                    there,
                    rows - there,
                    n,
                    m,
                    place + c // PACKED,
                    args.codes_token,
                    scale,
                    shift,
                    args.zero,
                )
                scale += ENTRY
                shift += ENTRY

    @BLOCK.kernel
    def kernel(args, item, scratch):
        total = args.num_groups * args.heads * args.parts
        for unit in range(item * args.units, least((item + 1) * args.units, total)):
            rest = unit // args.parts
            encode_unit(args, rest // args.heads, rest % args.heads, unit % args.parts, scratch)

    return kernel
