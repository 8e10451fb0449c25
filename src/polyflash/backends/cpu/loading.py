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
    offset_of: Any  # (args, i_b, live, seqlen_q)
    table_entry: Any  # (args, slot, i_b, default)


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
    arg, load_i32 = simd.word, simd.load_i32
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
    def offset_of(args, i_b, live, seqlen_q):  # type: ignore[no-untyped-def]
        if arg(args, a.Q_OFFSET) != 0:
            return load_i32(arg(args, a.Q_OFFSET) + i_b * arg(args, a.Q_OFFSET_STRIDE))
        return arg(args, a.OFFSET) if arg(args, a.HAS_OFFSET) != 0 else live - seqlen_q

    @device(4, types.int64)
    def table_entry(args, slot, i_b, default):  # type: ignore[no-untyped-def]
        return load_i32(arg(args, slot) + i_b * arg(args, slot + 1)) if arg(args, slot) != 0 else default

    return Loaders(gathered, load_tile, offset_of, table_entry)
