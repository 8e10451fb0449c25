"""Quantised keys and values: schemes, codecs, tensors that attention reads as codes, choosing, guarding."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polyflash.quant.scheme import NAMED, Scheme

if TYPE_CHECKING:
    from polyflash.quant.choosing import Recommendation, recommend_scheme
    from polyflash.quant.guard import ErrorBudgetExceeded, Guard
    from polyflash.quant.tensor import QuantizedTensor, dequantize, quantize

__all__ = ["NAMED", "ErrorBudgetExceeded", "Guard", "QuantizedTensor", "Recommendation", "Scheme"]
__all__ += ["dequantize", "quantize", "recommend_scheme"]
_HOMES = {"Recommendation": "choosing", "recommend_scheme": "choosing"}
_HOMES |= {"ErrorBudgetExceeded": "guard", "Guard": "guard"}


def __getattr__(name: str) -> Any:
    """Imports what needs torch when it is asked for: `polyflash --help` does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"polyflash.quant.{_HOMES.get(name, 'tensor')}"), name)
