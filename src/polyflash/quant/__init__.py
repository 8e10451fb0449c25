"""Quantised keys and values: schemes, codecs, and the tensors that attention reads as codes."""

from typing import TYPE_CHECKING, Any

from polyflash.quant.scheme import NAMED, Scheme

if TYPE_CHECKING:
    from polyflash.quant.tensor import QuantizedTensor, dequantize, quantize

__all__ = ["NAMED", "QuantizedTensor", "Scheme", "dequantize", "quantize"]


def __getattr__(name: str) -> Any:
    """Imports what needs torch when it is asked for: `polyflash --help` does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polyflash.quant import tensor

    return getattr(tensor, name)
