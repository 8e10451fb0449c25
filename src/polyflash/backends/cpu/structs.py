"""The words of words.py inside kernels: numba types whose attributes are words, and functions that take them.

args.q_row          a word of the argument block
tile.k              where a tile of the thread's scratch lies
item.head = head    a word of the item, which lies in the scratch
"""

from __future__ import annotations

import inspect
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.core.datamodel import models
from numba.core.imputils import lower_cast
from numba.core.typeconv import Conversion
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, lower_setattr_generic, register_model

from polyflash.backends.cpu.compilers import INLINED, KERNEL
from polyflash.backends.cpu.intrinsics import callable_by_numba
from polyflash.backends.cpu.simd import I64, POINTER
from polyflash.backends.cpu.words import COLUMN, ITEM, Layout


class _Laid(types.Type):
    """A type whose values lead to the words of a layout: an int64 to those who ask for one."""

    layout: Layout

    def can_convert_to(self, context: Any, other: Any) -> Any:
        alike = type(other) is type(self) and self.layout.begins_as(other.layout)
        return Conversion.safe if alike or other == types.int64 else None


class Words(_Laid):
    """The address of a block."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        super().__init__(f"Words({layout.name})")


class Tiles(_Laid):
    """A thread's scratch, whose tiles lie where the words of an argument block say."""

    def __init__(self, layout: Layout, item: Layout) -> None:
        self.layout = layout
        self.args = Words(layout)
        self.views = {"item": (Words(item), 0), "column": (Words(COLUMN), 8 * len(ITEM.words))}
        super().__init__(f"Tiles({layout.name}, {item.name})")


@register_model(Words)
class _WordsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, I64)


@register_model(Tiles)
class _TilesModel(models.StructModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, [("args", types.int64), ("scratch", types.int64)])


@infer_getattr
class _WordsAttributes(AttributeTemplate):
    key = Words

    def generic_resolve(self, block: Any, name: str) -> Any:  # type: ignore[override]
        return types.int64 if isinstance(vars(block.layout).get(name), int) else None


@infer_getattr
class _TilesAttributes(AttributeTemplate):
    key = Tiles

    def generic_resolve(self, tile: Any, name: str) -> Any:  # type: ignore[override]
        if name == "args":
            return tile.args
        if name in tile.views:
            return tile.views[name][0]
        return types.int64 if name in tile.layout.tiles else None


@lower_getattr_generic(Words)
def _load(context: Any, builder: Any, block: Words, address: Any, name: str) -> Any:
    return _word(builder, address, getattr(block.layout, name))


@lower_setattr_generic(Words)
def _store(context: Any, builder: Any, signature: Any, values: Any, name: str) -> None:
    address = builder.add(values[0], I64(8 * getattr(signature.args[0].layout, name)), flags=["nsw"])
    builder.store(values[1], builder.inttoptr(address, POINTER), align=8)


@lower_getattr_generic(Tiles)
def _tile(context: Any, builder: Any, tile: Tiles, value: Any, name: str) -> Any:
    args, scratch = (builder.extract_value(value, i) for i in (0, 1))
    if name == "args":
        return args
    distance = tile.views[name][1] if name in tile.views else 0
    number = tile.layout.tiles["item" if name in tile.views else name]
    place = builder.add(scratch, _word(builder, args, number), flags=["nsw"])
    return builder.add(place, I64(distance), flags=["nsw"]) if distance else place


def _word(builder: Any, address: Any, number: int) -> Any:
    place = builder.gep(builder.inttoptr(address, POINTER), [I64(number)], source_etype=I64)
    return builder.load(place, typ=I64, align=8)


@lower_cast(Words, types.int64)
@lower_cast(Words, Words)
@lower_cast(Tiles, Tiles)
def _same(context: Any, builder: Any, kind: Any, to: Any, value: Any) -> Any:
    return value


@lower_cast(Tiles, types.int64)
def _base(context: Any, builder: Any, kind: Any, to: Any, value: Any) -> Any:
    return builder.extract_value(value, 1)


class Blocks:
    """The blocks that the device functions of one kernel take: parameters named `args`, `tile`, `item` and
    `column` are such, all others int64."""

    def __init__(self, call: Layout, item: Layout = ITEM) -> None:
        self.kinds = {
            "args": Words(call),
            "tile": Tiles(call, item),
            "item": Words(item),
            "column": Words(COLUMN),
        }

    def device(self, function: Any) -> Any:
        """Compiles for its callers in kernels."""
        return njit(tuple(self._kinds(function)), error_model="numpy", **INLINED)(function)

    def kernel(self, function: Any) -> Any:
        """Compiles for callers outside: a numba cfunc that returns nothing."""
        return cfunc(types.void(*self._kinds(function)), error_model="numpy", **KERNEL)(function)

    def _kinds(self, function: Any) -> list[Any]:
        return [self.kinds.get(name, types.int64) for name in inspect.signature(function).parameters]

    def words(self, layout: Layout) -> Any:
        """(address) -> the words there."""
        return callable_by_numba("words", 1, Words(layout), lambda builder, address: address)

    def tiles(self) -> Any:
        """(args, scratch) -> the tiles there."""

        def emit(builder: Any, args: Any, scratch: Any) -> Any:
            empty = ir.Constant(ir.LiteralStructType([I64, I64]), ir.Undefined)
            return builder.insert_value(builder.insert_value(empty, args, 0), scratch, 1)

        return callable_by_numba("tiles", 2, self.kinds["tile"], emit)
