"""The two errors polyflash raises on purpose; both are raised before any kernel is launched."""

from __future__ import annotations


class SpecError(ValueError):
    """The call itself is wrong: a shape, dtype, ratio, length or option. The text says got, wanted and what
    to change."""


class UnsupportedError(NotImplementedError):
    """The call is legal, but no kernel (or not the requested one) can run it.

    Attributes:
        reasons: one `(row name, refusals)` pair per candidate row, every refusal listed.
    """

    def __init__(self, message: str, reasons: tuple[tuple[str, tuple[str, ...]], ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


def spec_error(name: str, *, got: object, wanted: object, change: str) -> SpecError:
    """A `SpecError` in the one format all of them share."""
    return SpecError(f"{name}: got {got}, wanted {wanted}. {change}")
