"""A backend's report to `polyflash doctor`, `env` and `cache`: one protocol for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Advice:
    """Something in the way of calls, and the one thing to do about it. `fatal`: nothing runs until then."""

    what: str
    remedy: str
    fatal: bool = False


class Report:
    """A backend's answers: those of a backend with nothing to say, or the module `report` of its folder with
    functions of these names; `backends.report_of` imports it."""

    def facts(self) -> Mapping[str, Callable[[], dict[str, Any]]]:
        """Sections of `polyflash env` by name, each found when it is printed, so that one may fail alone."""
        return {}

    def advice(self, probed: Mapping[str, Any]) -> Iterable[Advice]:
        """Obstacles for this backend; `probed` is torch's own report from a fresh process."""
        return ()

    def kernel_cache(self) -> tuple[Any, bytes] | None:
        """The module of its folder of compiled kernels, as `backends/cpu/store.py`, and the digest of what
        would make one now, empty without a compiler; None if it has no such folder."""
        return None
