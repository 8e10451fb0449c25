"""polyflash: one attention function with exact semantics, and the fastest kernel for the device at hand."""

import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Module of each public name, imported when it is asked for: `polyflash --help` takes no time. Types are in
# __init__.pyi. No submodule may have the name of a function: its import would take the name over.
_HOMES = {
    "api": ("attention", "attention_paged", "attention_varlen", "explain", "use_backend"),
    "counting": ("counters", "watch"),
    "errors": ("SpecError", "UnsupportedError"),
    "groups": ("GroupsPlan", "attention_groups", "explain_groups"),
    "mask": ("Mask",),
    "merging": ("AttentionOutput", "merge"),
    "plan": ("Plan",),
    "quant.tensor": ("QuantizedTensor", "dequantize", "quantize"),
    "statistics": ("RowStats", "column_sums", "row_stats"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)
_MODULES = ("integrations", "kvcache", "parallel", "quant", "webgpu")


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOME.get(name, name)}")
    globals()[name] = home if name in _MODULES else getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


for _name in __all__ if "torch" in sys.modules else ():  # the ops too: a program with them may be loaded next
    __getattr__(_name)
