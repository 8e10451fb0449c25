"""Triton's interpreter, which runs the kernels on CPU tensors: is it on, and what it needs to be right.

It is on if TRITON_INTERPRET was set when triton was first imported. Triton 3.6's has seven defects that would
hide or fake ours; `prepare` mends them once, and does nothing where it is off.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from polyflash import env

INTERPRET = env.TRITON_INTERPRET.is_set()
_done = False


def prepare() -> None:
    global _done
    if INTERPRET and not _done:
        _done = True
        _take_scalars_as_bounds()
        _take_constants_in_tuples()
        _patch_the_language_once()
        _compute_in_few_bits()
        _round_once()


def _take_scalars_as_bounds() -> None:
    """numpy from 2.4 on refuses int() of an array of one element, in which loop bounds are held."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _take_constants_in_tuples() -> None:
    """Unwraps constants that stand in a tuple beside others, where Triton leaves them wrapped."""
    from triton.language import constexpr
    from triton.runtime import interpreter

    original = interpreter._implicit_cvt
    interpreter._implicit_cvt = lambda x: x.value if isinstance(x, constexpr) else original(x)


def _patch_the_language_once() -> None:
    """Each call of a device function patches triton.language and none takes it back, so that no kernel can be
    compiled afterwards. One patch per launch is enough."""
    from triton import language
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    interpreter._patch_lang = lambda _: original(everything)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


def _compute_in_few_bits() -> None:
    """bfloat16 and floats of 8 bits are held as the bits of integers: products would multiply those, or cut
    them, and casts would cut instead of rounding to nearest even, and of 8 bits to the largest at most."""
    from triton import language as tl
    from triton.runtime import interpreter

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    product, cast, cast_8_bits = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp
    eights = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def widened(x: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        kind = eights.get(x.dtype.scalar)
        if kind is None:
            return x
        return handle(torch.from_numpy(np.array(x.data)).view(kind).float().numpy(), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        return product(self, widened(a), widened(b), acc, *rest)

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        if not (x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16):
            return cast(self, x, to)
        bits = np.ascontiguousarray(x.data).view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
        return handle(np.where(np.isnan(x.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)

    def create_fp_to_fp(self: Any, x: Any, to: Any, rounding: Any) -> Any:
        if x.dtype.scalar in eights and to.scalar == tl.float32:
            return widened(x)
        if to.scalar not in eights or x.dtype.scalar != tl.float32:
            return cast_8_bits(self, x, to, rounding)
        kind = eights[to.scalar]
        most = torch.finfo(kind).max
        codes = torch.from_numpy(np.array(x.data)).clamp(-most, most).to(kind)
        return handle(codes.view(torch.uint8).numpy(), to.scalar)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp


def _round_once() -> None:
    """A multiply-add rounds its product too; a GPU's does not."""
    from triton.runtime import interpreter

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        with np.errstate(all="ignore"):
            exact = (x.data.astype(np.float64) * y.data + z.data).astype(z.data.dtype)
        return interpreter.TensorHandle(exact, z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma
