"""The two errors polyflash raises on purpose; both are raised before any kernel is launched."""

from __future__ import annotations

from typing import Any


class SpecError(ValueError):
    """The call itself is wrong: a shape, dtype, ratio, length or option. The text says got, wanted and what
    to change."""


class UnsupportedError(NotImplementedError):
    """The call is legal, but no kernel (or not the requested one) can run it.

    Attributes:
        reasons: one `(row name, refusals)` pair per candidate row, every refusal listed."""

    def __init__(self, message: str, reasons: tuple[tuple[str, tuple[str, ...]], ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


def spec_error(name: str, got: object, wanted: object, change: str) -> SpecError:
    """A `SpecError` in the one format all of them share."""
    return SpecError(f"{name}: got {got}, wanted {wanted}. {change}")


def described(value: Any) -> str:
    """A wrong argument in a few words: numbers and short text as written, all else by its kind, tensors and
    arrays by dtype and shape. What they contain never gets into a message."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, (int, float, complex)):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:60]!r}... of {len(value)} characters"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if not hasattr(value, "dtype"):
        return type(value).__name__
    if getattr(value, "is_nested", False):  # has no shape to show
        return "a nested tensor"
    kind, layout = str(value.dtype), str(getattr(value, "layout", "torch.strided"))
    library = "" if "." in kind else f"{type(value).__module__.partition('.')[0]} "
    form = "" if layout == "torch.strided" else f"{layout} "
    return f"{library}{form}{kind} {tuple(getattr(value, 'shape', ()))}"
