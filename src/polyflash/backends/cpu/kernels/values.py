"""Codes become values, head by head and part by part of its tokens, with the bits of quant/codec.py."""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import intrinsics
from polyflash.backends.cpu.code_rows import ValuesTile
from polyflash.backends.cpu.configs import STORAGE_BYTES
from polyflash.backends.cpu.intrinsics import least
from polyflash.backends.cpu.quantize_configs import ValuesKey
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import VALUES

BLOCK = Blocks(VALUES)
device = BLOCK.device
ROWS_AHEAD = 16  # whose codes are prefetched


def build(key: ValuesKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    stage, WIDTH = intrinsics.stages(key, ValuesTile(key)), key.head_dim * STORAGE_BYTES[key.storage]
    TOKENS, SHIFT_TOKENS = key.codes.scale.tokens, 0 if key.codes.shift is None else key.codes.shift.tokens

    @device
    def end_of_run(j, last):
        """The keys from j on up to here share scales and shifts unless each has its own."""
        if TOKENS > 1:
            last = least(last, (j // TOKENS + 1) * TOKENS)
        if SHIFT_TOKENS > 1:
            last = least(last, (j // SHIFT_TOKENS + 1) * SHIFT_TOKENS)
        return last

    @BLOCK.kernel
    def kernel(args, item, scratch):
        i_bh, first = item // args.parts, item % args.parts * args.part
        i_b, i_h, step = i_bh // args.heads, i_bh % args.heads, args.codes_token
        codes = args.codes + i_b * args.codes_batch + i_h * args.codes_head
        values = args.values + i_bh * args.tokens * WIDTH
        scales = args.scale + i_b * args.scale_batch + i_h * args.scale_head
        shifts = args.shift + i_b * args.shift_batch + i_h * args.shift_head
        scale_step = args.scale_block if TOKENS == 1 else 0
        shift_step = args.shift_block if SHIFT_TOKENS == 1 else 0
        j, last = first, least(first + args.part, args.tokens)
        while j < last:
            end, scale, shift = end_of_run(j, last), scales, shifts
            if TOKENS > 0:
                scale += j // TOKENS * args.scale_block
            if SHIFT_TOKENS > 0:
                shift += j // SHIFT_TOKENS * args.shift_block
            row, ahead = codes + j * step, codes + (j + ROWS_AHEAD) * step
            dst = values + j * WIDTH
            stage.decode_rows(row, step, end - j, dst, WIDTH, scale, scale_step, shift, shift_step, ahead)
            j = end

    return kernel
