"""What one compiled dropout stage is made for. No DSL."""

from __future__ import annotations

from dataclasses import dataclass

from polyflash.backends.cpu.configs import _check_isa, _Panels


@dataclass(frozen=True, slots=True)
class DropoutKey(_Panels):
    """What drops weights of one panel's tile; every kernel of this isa and width calls it if it must.

    isa: instruction set. nv: vectors of query lanes per panel."""

    isa: str
    nv: int

    def __post_init__(self) -> None:
        _check_isa(self.isa, self.nv)

    @property
    def builder(self) -> str:
        return "polyflash.backends.cpu.dropout"

    @property
    def name(self) -> str:
        return f"dropout_{self.isa}_nv{self.nv}"
