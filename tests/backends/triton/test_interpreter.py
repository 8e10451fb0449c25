"""The interpreter as tests/interpreter.py hastens it says of types what Triton says."""

from __future__ import annotations

import numpy as np
import pytest

from polyflash.backends.triton.interpreter import INTERPRET

if not INTERPRET:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from triton.language import core
from triton.runtime import interpreter


def test_types_of_blocks():
    made = core.block_type(core.float32, [core.constexpr(16), 4])
    assert made == core.block_type(core.float32, [16, 4]) == made.with_element_ty(core.float32)
    assert (made.shape, made.numel, str(made.scalar)) == ((16, 4), 64, "fp32")
    pointers = core.block_type(core.pointer_type(core.float32), [16, 4])
    others = (made.with_element_ty(core.int32), core.block_type(core.float32, [4, 16]), pointers)
    assert all(other != made for other in others) and pointers.scalar == core.pointer_type(core.float32)
    with pytest.raises(TypeError, match="0d"):
        core.block_type(core.float32, [])
    with pytest.raises(AssertionError):
        core.block_type(core.float32, (16, 4))  # as the compiler, which takes none of Python's


def test_types_of_tuples():
    values = [core.constexpr(16), core.constexpr(core.float32)]
    assert core.tuple(values).type == core._type_for_tuple_values(values)
    named = core.tuple(values, core.tuple_type([x.type for x in values], ["rows", "kind"]))
    assert named.rows is values[0] and named.kind is values[1]


def test_dtypes_of_numpy():
    wanted = {core.float32: np.float32, core.bfloat16: np.uint16, core.int1: bool, core.int64: np.int64}
    for kind, dtype in wanted.items():
        pointer = core.pointer_type(kind)
        for asked, found in ((kind, dtype), (pointer, np.uint64)):
            assert interpreter._get_np_dtype(asked) == found
            assert interpreter._get_np_dtype(core.block_type(asked, [4])) == found
