"""Triton's interpreter, three times as quick: the same kernels, tensors and checks, without work whose result
nobody asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any


def hasten() -> None:
    from triton.language import core
    from triton.runtime.interpreter import interpreter_builder as builder

    if not builder.options.debug:  # every sum of integers is made in 64 bits too, and looked at in debug mode
        builder.options = replace(builder.options, sanitize_overflow=False)
    _make_types_of_blocks_once(core)
    _make_types_of_tuples_late(core)
    _find_dtypes_once(core)


def _make_types_of_blocks_once(core: Any) -> None:
    """Per dtype and shape; their names are written out each time."""
    original, made = core.block_type.__init__, {}

    def init(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        assert isinstance(shape, (list, core.tuple))
        key = (element_ty.name, *(s.value if isinstance(s, core.constexpr) else s for s in shape))
        if key not in made:
            original(self, element_ty, shape)
            made[key] = dict(self.__dict__)
        self.__dict__.update(made[key])

    core.block_type.__init__ = init


def _make_types_of_tuples_late(core: Any) -> None:
    """When somebody looks: shapes are tuples."""
    original, fields = core.tuple.__init__, core.tuple.__getattr__

    def init(self: Any, args: Sequence[Any], type: Any = None) -> None:
        if type is not None:
            original(self, args, type)
        else:
            self.values = list(args)

    def getattr(self: Any, name: str) -> Any:
        if name != "type":
            return fields(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    core.tuple.__init__, core.tuple.__getattr__ = init, getattr


def _find_dtypes_once(core: Any) -> None:
    """Of numpy, by Triton's; asked for by every operation, and a table of all is built each time."""
    from triton.runtime import interpreter

    original, found = interpreter._get_np_dtype, {}

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = original(kind)
        return found[name]

    interpreter._get_np_dtype = dtype_of
