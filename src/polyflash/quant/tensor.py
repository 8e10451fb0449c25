"""Quantised tensors: codes with their tables, made by `quantize` and read by `dequantize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from polyflash.dtypes import BY_NAME
from polyflash.errors import described, spec_error
from polyflash.mask import is_strided
from polyflash.quant import codec
from polyflash.quant.scheme import KINDS, NAMED, Codes, Scheme

QuantizedLayout = Literal["bhsd", "bshd", "thd"]
_AXES = {
    "bhsd": "(batch, heads, seqlen, head_dim)",
    "bshd": "(batch, seqlen, heads, head_dim)",
    "thd": "(total, heads, head_dim)",
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A tensor as codes, which goes wherever k or v goes. `quantize` makes one; codes from elsewhere are
    checked here.

    Args:
        codes: (batch or pages, heads, seqlen, head_dim), whatever the layout: a view is enough. int8,
            float8_e4m3fn or float8_e5m2; codes of 4 bits uint8, half as wide.
        scale: (batch or pages, heads, blocks of tokens, blocks of channels), 1 where all share one, in the
            dtype of the scheme's tables.
        shift: likewise, -zero·scale of an asymmetric scheme, the mean of a smoothed one; else None.
        scheme: what the codes mean.
        dtype: of the values; calls decode into that of q.
        layout: of `shape`, and of the calls that take it.

    Raises:
        SpecError: a dtype, shape or device that does not belong to the scheme."""

    codes: Tensor
    scale: Tensor
    shift: Tensor | None
    scheme: Scheme
    dtype: torch.dtype
    layout: QuantizedLayout = "bhsd"
    # In the graph of autograd, takes the gradient: values without storage, under torch.func x itself.
    source: Tensor | None = None

    def __post_init__(self) -> None:
        stored = getattr(torch, KINDS[self.form.dtype].storage)
        if self.codes.ndim != 4 or self.codes.dtype is not stored:
            change = "Fnuz floats, unpacked nibbles and unsigned bytes are other codes: convert them first."
            wanted = f"{stored} with 4 dimensions for {self.scheme.dtype}"
            raise spec_error("codes", described(self.codes), wanted, change)
        check_tables("", self.scale, self.shift, self.form, self.codes)

    @property
    def shape(self) -> torch.Size:
        batch, heads, tokens, stored = self.codes.shape
        channels = stored * self.form.packed
        sizes = (heads, tokens) if self.layout == "bhsd" else (tokens, heads)
        return torch.Size((*sizes, channels) if self.layout == "thd" else (batch, *sizes, channels))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def requires_grad(self) -> bool:
        return self.source is not None

    @property
    def form(self) -> Codes:
        """The form of the codes, as kernels read them."""
        return self.scheme.codes

    @property
    def text(self) -> str:
        """The form as the op's argument says it."""
        return self.scheme.text

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and shifts; an expanded scale counts once."""
        tensors = (x for x in (self.codes, self.scale, self.shift) if x is not None)
        return sum(
            x.element_size()
            * int(torch.Size(n for n, s in zip(x.shape, x.stride(), strict=True) if s).numel())
            for x in tensors
        )

    def to(self, device: str | torch.device) -> QuantizedTensor:
        """The same codes on another device, without the gradient's way back."""
        return self._with(lambda x: x.to(device))

    def pages(self, at: Tensor) -> QuantizedTensor:
        """Those of these numbers, of a pool of pages."""
        return self._with(lambda x: x[at])

    def _with(self, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        shift = None if self.shift is None else change(self.shift)
        return replace(self, codes=change(self.codes), scale=change(self.scale), shift=shift, source=None)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values (batch, heads, seqlen, head_dim) in `dtype`, of a rotated scheme still rotated."""
        made = codec.decode(self.codes, self.scale, self.shift, self.form, dtype)
        if self.source is None:
            return made
        if codec.transforms():  # whose graphs drop the backward of a Function: pytorch/pytorch#193279
            zeros = (self.source - self.source.detach()).nan_to_num(0.0)  # dead tokens may hold anything
            return made.detach() + zeros.to(dtype)
        return _Through.apply(self.source, made)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        s = self.scheme
        size = f"{self.nbytes / 2**20:.3g} MiB"
        return f"QuantizedTensor({s.dtype} per {s.granularity}, {tuple(self.shape)}, {size} on {self.device})"


def check_tables(of: str, scale: Any, shift: Any, form: Codes | None, codes: Tensor) -> None:
    """Refuses scales or shifts without one entry for each block of codes, or that nobody reads."""
    for name, table in (("scale", scale), ("shift", shift)):
        block = getattr(form, name, None)
        if (table is None) is not (block is None):
            wanted = "None" if block is None else "a table"
            change = "A QuantizedTensor has those of its scheme; a zero point is a shift of -zero·scale."
            raise spec_error(of + name, described(table), wanted, change)
        if table is None or block is None or form is None:
            continue
        batch, heads, tokens, width = codes.shape
        shape, dtype = (batch, heads, *block.counts(tokens, width * form.packed)), codec.table_dtype(form)
        if (tuple(table.shape), table.dtype, table.device) != (shape, dtype, codes.device):
            got = f"{tuple(table.shape)} {table.dtype} on {table.device}"
            wanted = f"{shape} {dtype} on {codes.device}"
            raise spec_error(of + name, got, wanted, "It has an entry for each block of the codes.")


KV = Tensor | QuantizedTensor  # k or v of the public functions


class _Source(torch.autograd.Function):
    """Values of x's shape without storage: what a gradient of the codes goes through on its way to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Through(torch.autograd.Function):
    """The decoded values, whose gradient goes to their source as it is: straight through the rounding."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = source.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _is_differentiated(x: Tensor) -> bool:
    """May something be differentiated by x? In a graph x does not say what torch.func does."""
    if not torch.is_grad_enabled() or x.requires_grad:
        return torch.is_grad_enabled()
    kinds, functorch = codec.transforms(), torch._C._functorch
    forward = "Jvp" in kinds
    if torch.compiler.is_compiling():
        return forward or "Grad" in kinds
    while functorch.is_functorch_wrapped_tensor(x) and not (forward or x.requires_grad):
        x = functorch.get_unwrapped(x)
    return functorch.is_functorch_wrapped_tensor(x) or x.requires_grad


def quantize(
    x: Tensor, scheme: Scheme, *, layout: QuantizedLayout = "bhsd", lens: Tensor | None = None
) -> QuantizedTensor:
    """Quantises k or v.

    The gradient of what is computed from the codes goes to x straight through the rounding, of a rotated
    scheme rotated back.

    Args:
        x: float (batch, heads, seqlen, head_dim), with layout="bshd" (batch, seqlen, heads, head_dim) or
            pages (num_pages, page_size, heads, head_dim), with "thd" packed members (total, heads, head_dim).
            Groups of tokens count from token 0 of a head, of pages from slot 0.
        scheme: `polyflash.quant.Scheme`; or for both k and v one of `quant.NAMED`'s.
        lens: int (batch,): live tokens. Padding beyond changes no scale and no mean.

    Returns:
        A `QuantizedTensor`, to be passed as k or v to `attention`, `attention_varlen`, `attention_paged` and
        `attention_groups` in the same layout.

    Raises:
        SpecError: x is no float tensor of this layout; 4 bits and an odd head_dim; something else than a
            scheme."""
    if not isinstance(scheme, Scheme):
        named = scheme if isinstance(scheme, str) and scheme in NAMED else next(iter(NAMED))
        change = f"From polyflash.quant import NAMED; NAMED[{named!r}] is a pair, for k and for v."
        raise spec_error("scheme", described(scheme), "a polyflash.quant.Scheme", change)
    if not isinstance(layout, str) or layout not in _AXES:
        raise spec_error("layout", described(layout), ", ".join(_AXES), "Name the axes of x.")
    if not isinstance(x, Tensor) or not is_strided(x) or str(x.dtype).removeprefix("torch.") not in BY_NAME:
        raise spec_error("x", described(x), "a float tensor", f"Pass {_AXES[layout]}.")
    if x.ndim != (3 if layout == "thd" else 4):
        got = f"{x.ndim} dimensions {tuple(x.shape)}"
        raise spec_error("x", got, _AXES[layout], "Name another layout with layout=.")
    if lens is not None and (not isinstance(lens, Tensor) or lens.shape != x.shape[:1] or layout == "thd"):
        change = "Give the live tokens of each batch entry."
        raise spec_error("lens", described(lens), f"int tensor ({x.shape[0]},)", change)
    made = QuantizedTensor(*codec.encode(canonical(x, layout), scheme, lens), scheme, x.dtype, layout)
    if not _is_differentiated(x):
        return made
    source = canonical(x, layout)
    if scheme.rotation != "none":
        source = codec.rotate(source)
    if not codec.transforms():
        source = _Source.apply(source)  # type: ignore[no-untyped-call]
    return replace(made, source=source)


def canonical(x: Tensor, layout: QuantizedLayout) -> Tensor:
    """A view (batch, heads, seqlen, head_dim) of a tensor in `layout`."""
    if layout == "thd":
        return x.transpose(0, 1).unsqueeze(0)
    return x if layout == "bhsd" else x.transpose(1, 2)


def values_of(x: Any) -> Any:
    """The values of a `QuantizedTensor`; anything else as it is."""
    return dequantize(x) if isinstance(x, QuantizedTensor) else x


def dequantize(x: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values that the codes of `x` stand for, in its layout, rotated back; in `dtype`, or x's own.
    Differentiable like attention over x."""
    if not isinstance(x, QuantizedTensor):
        raise spec_error("x", described(x), "a QuantizedTensor", "quantize() makes one.")
    values = x.values(x.dtype if dtype is None else dtype)
    if x.scheme.rotation != "none":
        values = codec.rotate(values)
    if x.layout == "thd":
        return values[0].transpose(0, 1)
    return values if x.layout == "bhsd" else values.transpose(1, 2)
