"""Device functions that every attention kernel of this engine shares: reading rows of any stride, and where
a batch entry's rows stand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import configs

if TYPE_CHECKING:
    from polyflash.backends.cpu.backward_blocks import Stages as BackwardStages
    from polyflash.backends.cpu.blocks import Stages
    from polyflash.backends.cpu.configs import KernelKey


class Loaders(NamedTuple):
    """Callables for numba code; every argument is an int64."""

    gathered: Any  # (scratch_row, src, stride, count) -> address
    load_tile: Any  # (args, scratch, src, row_stride, dim_stride, rows, count, dst)
    stand: Any  # (args, scratch, i_b) -> index into the tensors, first row and key, rows, start and live key
    key_rows: Any  # (args, i_t, i_hkv, first_k) -> addresses of K and V


def device(arity: int, result: Any = None) -> Any:
    """A decorator: int64 arguments; inlined, so nothing is seen to raise and the object needs no Python
    symbol."""
    from numba import njit, types

    returned = types.void if result is None else result
    decorate: Any = njit
    compiled = decorate(
        returned(*[types.int64] * arity),
        error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True,
    )  # fmt: skip

    def left_to_its_caller(function: Any) -> Any:
        with _optimized_once(function.__qualname__):
            return compiled(function)

    return left_to_its_caller


@contextmanager
def _optimized_once(name: str) -> Iterator[None]:
    """Within it, numba does not optimize the module of function `name`: its caller inlines and optimizes it
    anyway, and each level anew takes a third of a kernel's compile time. A numba without this inner step
    just takes longer."""
    from numba.core import codegen

    library: Any = codegen.CPUCodeLibrary
    whole, me = getattr(library, "_optimize_final_module", None), threading.get_ident()
    if whole is None:
        yield
        return

    def unless_inlined(self: Any) -> None:
        if self.name != name or threading.get_ident() != me:
            whole(self)

    library._optimize_final_module = unless_inlined
    try:
        yield
    finally:
        library._optimize_final_module = whole


def loaders(key: KernelKey, stage: Stages | BackwardStages) -> Loaders:
    """For kernels of `key`'s storage."""
    from numba import types

    from polyflash.backends.cpu import simd

    gather_row, load_rows = stage.gather_row, stage.load_rows
    arg, load_i32, store_i64 = simd.word, simd.load_i32, simd.store_i64
    least, greatest = simd.least, simd.greatest
    SIZE, K_BYTES = configs.STORAGE_BYTES[key.storage], key.k_row_bytes

    @device(4, types.int64)
    def gathered(scratch_row, src, stride, count):  # type: ignore[no-untyped-def]
        """Where the row at `src` can be read with unit stride."""
        if stride == SIZE:
            return src
        gather_row(src, stride, count, scratch_row)
        return scratch_row

    @device(8)
    def load_tile(args, scratch, src, row_stride, dim_stride, rows, count, dst):  # type: ignore[no-untyped-def]
        """`rows` rows of `count` elements into scratch rows, zero up to a whole vector."""
        if dim_stride == SIZE:
            load_rows(src, row_stride, rows, count, dst)
        else:
            row = scratch + arg(args, a.T_GATHER)
            for r in range(rows):
                gather_row(src + r * row_stride, dim_stride, count, row)
                load_rows(row, 0, 1, count, dst + r * K_BYTES)

    @device(4, types.int64)
    def table_entry(args, slot, i_b, default):  # type: ignore[no-untyped-def]
        return load_i32(arg(args, slot) + i_b * arg(args, slot + 1)) if arg(args, slot) != 0 else default

    @device(3, types.UniTuple(types.int64, 6))
    def stand(args, scratch, i_b):  # type: ignore[no-untyped-def]
        """Where batch entry, or packed member, `i_b` stands: index into the tensors, first row and key there,
        number of rows, first and end live key. The item's words for the pass are written."""
        i_t, first_q, first_k = i_b, 0, 0
        seqlen_q, seqlen_k = arg(args, a.SEQLEN_Q), arg(args, a.SEQLEN_K)
        # Bounds were checked before the call; held within the tensors all the same, as another thread may
        # write them.
        if arg(args, a.CU_Q) != 0:
            cu_q = arg(args, a.CU_Q) + 4 * i_b
            i_t, first_q = 0, least(greatest(load_i32(cu_q), 0), seqlen_q)
            seqlen_q = greatest(least(load_i32(cu_q + 4), seqlen_q) - first_q, 0)
        if arg(args, a.CU_K) != 0:
            cu_k = arg(args, a.CU_K) + 4 * i_b
            first_k = least(greatest(load_i32(cu_k), 0), seqlen_k)
            seqlen_k = greatest(least(load_i32(cu_k + 4), seqlen_k) - first_k, 0)
        live = least(greatest(table_entry(args, a.KV_LENS, i_b, seqlen_k), 0), seqlen_k)
        start = greatest(table_entry(args, a.KV_STARTS, i_b, 0), 0)
        offset = arg(args, a.OFFSET) if arg(args, a.HAS_OFFSET) != 0 else live - seqlen_q
        offset = table_entry(args, a.Q_OFFSET, i_b, offset)
        item = scratch + arg(args, a.T_ITEM)
        store_i64(item + 8 * a.I_BATCH, i_b)
        store_i64(item + 8 * a.I_SEQLEN_K, seqlen_k)
        store_i64(item + 8 * a.I_OFFSET, offset)
        # Row i sees keys [max(start, i + lo_shift), min(live, i + hi_shift)); clamped, shifts fit 32 bits.
        lo_shift, hi_shift = offset - arg(args, a.LEFT), offset + arg(args, a.RIGHT) + 1
        store_i64(item + 8 * a.I_LO_SHIFT, least(greatest(lo_shift, -seqlen_q), seqlen_k))
        store_i64(item + 8 * a.I_HI_SHIFT, least(greatest(hi_shift, -seqlen_q), seqlen_k))
        return i_t, first_q, first_k, seqlen_q, start, live

    @device(4, types.UniTuple(types.int64, 2))
    def key_rows(args, i_t, i_hkv, first_k):  # type: ignore[no-untyped-def]
        """Where K and V of key 0 of a kv head lie; of pages, in page 0."""
        k = arg(args, a.K) + i_hkv * arg(args, a.K_HEAD)
        v = arg(args, a.V) + i_hkv * arg(args, a.V_HEAD)
        if arg(args, a.PAGE_TABLE) == 0:
            k += i_t * arg(args, a.K_BATCH) + first_k * arg(args, a.K_ROW)
            v += i_t * arg(args, a.V_BATCH) + first_k * arg(args, a.V_ROW)
        return k, v

    return Loaders(gathered, load_tile, stand, key_rows)
