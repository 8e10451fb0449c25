"""Keys of the CPU's quantisers, and which schemes have one. Pure arithmetic, no DSL."""

from __future__ import annotations

import re
from dataclasses import dataclass

from polyflash.backends.cpu.configs import ISAS, STORAGE_BYTES
from polyflash.quant.scheme import KINDS, Codes, Scheme
from polyflash.target import Target

_FLOATS = {"fp8_e4m3": (3, 7), "fp8_e5m2": (2, 15)}  # bits of the mantissa, bias of the exponent


@dataclass(frozen=True, slots=True)
class QuantizeKey:
    """The key of one quantiser. storage: dtype of the values; dtype: of the codes; by_channel: each channel
    has scales of its own, of however many tokens; rotated: by a Hadamard matrix first, in float32; tables:
    dtype of scales and shifts."""

    isa: str
    storage: str
    dtype: str
    affine: bool
    by_channel: bool
    rotated: bool = False
    tables: str = "float32"
    builder: str = "polyflash.backends.cpu.kernels.quantize"

    @property
    def name(self) -> str:
        steps = "affine" if self.affine else "symmetric"
        shared = "channel" if self.by_channel else "tokens"
        more = "_rotated" * self.rotated + "_narrow" * (self.tables != "float32")
        return f"quantize_{self.isa}_{self.storage}_{self.dtype}_{steps}_{shared}{more}"

    @property
    def lanes(self) -> int:
        return ISAS[self.isa].lanes

    @property
    def coded(self) -> str:
        """The dtype of the values that codes are made of."""
        return "float32" if self.rotated else self.storage

    @property
    def packed(self) -> int:
        """Codes in a byte."""
        return 8 // KINDS[self.dtype].bits

    @property
    def float_form(self) -> tuple[int, int]:
        return _FLOATS[self.dtype]


@dataclass(frozen=True, slots=True)
class RotateKey:
    """The key of what rotates rows of one dtype."""

    isa: str
    storage: str
    builder: str = "polyflash.backends.cpu.kernels.rotate"

    @property
    def name(self) -> str:
        return f"rotate_{self.isa}_{self.storage}"


@dataclass(frozen=True, slots=True)
class ValuesKey:
    """The key of what makes values of one dtype of codes, whose form and head dim are known to it."""

    isa: str
    storage: str
    codes: Codes
    head_dim: int
    builder: str = "polyflash.backends.cpu.kernels.values"

    @property
    def name(self) -> str:
        form = re.sub(r"\W", "_", str(self.codes._replace(compute="float")))
        return f"values_{self.isa}_{self.storage}_d{self.head_dim}_{form}"

    @property
    def lanes(self) -> int:
        return ISAS[self.isa].lanes


def key_for(scheme: Scheme, storage: str, target: Target) -> QuantizeKey | None:
    """The quantiser of a scheme, or None if the codec alone has it."""
    shared = scheme.codes.scale.channels
    halved = shared > 1 and shared % scheme.codes.packed  # a byte of two blocks
    if scheme.granularity == "tensor" or scheme.smoothing == "block_mean" or halved:
        return None
    if target.arch not in ISAS or storage not in STORAGE_BYTES or not target.has_package("numba"):
        return None
    kinds = scheme.dtype, not scheme.symmetric, shared == 1, scheme.rotated_in_pass, scheme.tables
    return QuantizeKey(target.arch, storage, *kinds)
