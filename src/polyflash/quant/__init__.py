"""Quantised keys and values: schemes, codecs, and the tensors that attention reads as codes."""

from polyflash.quant.scheme import NAMED, Scheme
from polyflash.quant.tensor import QuantizedTensor, dequantize, quantize

__all__ = ["NAMED", "QuantizedTensor", "Scheme", "dequantize", "quantize"]
