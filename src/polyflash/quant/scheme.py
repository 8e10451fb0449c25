"""Quantisation schemes: which codes stand for a tensor, how many elements share a scale, and how the two
are written in an op's text argument. Data alone, without tensors.

    value[b, h, j, d] = decode(code[b, h, j, d]) · scale[b, h, j // T, d // C] + shift[b, h, j // Ts, d // Cs]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from polyflash.errors import described, spec_error


class Kind(NamedTuple):
    """A dtype of codes. `most` is the value whose code is the largest, `levels` how many steps an affine
    range is cut into (0: codes of this kind are symmetric)."""

    bits: int
    storage: str  # torch's name; codes of 4 bits lie in pairs, the even channel in the low half
    most: float
    levels: int = 0


# NF4: quantiles of a normal distribution (Dettmers et al., QLoRA, 2023). E2M1: OCP MX specification (2023).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLES = {"nf4": NF4, "mxfp4": (*E2M1, *(-x for x in E2M1))}  # value of each code of 4 bits
# Halfway between neighbours: of all values, or of those that have a sign.
BORDERS = {name: tuple((a + b) / 2 for a, b in pairwise(x)) for name, x in (("nf4", NF4), ("mxfp4", E2M1))}
KINDS = {
    "int8": Kind(8, "int8", 127.0, 255),
    "int4": Kind(4, "uint8", 7.0, 15),
    "fp8_e4m3": Kind(8, "float8_e4m3fn", 448.0),
    "fp8_e5m2": Kind(8, "float8_e5m2", 57344.0),
    "nf4": Kind(4, "uint8", 1.0),
    "mxfp4": Kind(4, "uint8", 6.0),
}
GRANULARITIES = ("tensor", "head", "token", "channel", "block")
SMOOTHINGS = ("none", "mean", "block_mean")
ROTATIONS = ("none", "hadamard")
COMPUTES = ("float", "int8", "fp8")
TABLE_BITS = {"float32": 32, "bfloat16": 16}  # of scales and shifts
MULTIPLIED = {"int8": ("int8", "int4"), "fp8": ("fp8_e4m3",)}  # codes, by the compute of their products
MX_CHANNELS = 32
_ALL = 0  # of a block's sizes: every token, every channel


class Block(NamedTuple):
    """The elements that share a scale or a shift: so many tokens and channels of a head; 0 is all."""

    tokens: int = _ALL
    channels: int = _ALL

    def counts(self, tokens: int, channels: int) -> tuple[int, int]:
        """How many such blocks lie in a head of these sizes, by tokens and by channels."""
        return tuple(  # type: ignore[return-value]
            -(-size // step) if step else min(size, 1)
            for size, step in zip((tokens, channels), self, strict=True)
        )


class Codes(NamedTuple):
    """How a kernel reads one tensor of codes: what the text argument of the op says of it."""

    dtype: str
    scale: Block
    shift: Block | None = None
    compute: str = "float"
    tables: str = "float32"

    @property
    def packed(self) -> int:
        """Channels per stored element."""
        return 2 if KINDS[self.dtype].bits == 4 else 1

    def __str__(self) -> str:
        shift = "" if self.shift is None else f"+{self.shift.tokens}x{self.shift.channels}"
        compute = "" if self.compute == "float" else f"*{self.compute}"
        tables = "" if self.tables == "float32" else f":{self.tables}"
        return f"{self.dtype}/{self.scale.tokens}x{self.scale.channels}{shift}{compute}{tables}"


def per_word(codes: Codes) -> int:
    """Codes in 16 bits."""
    return 16 // KINDS[codes.dtype].bits


@lru_cache(maxsize=256)
def codes_of(text: str) -> tuple[Codes | None, Codes | None]:
    """K's codes and V's by the op's text argument: "int4/64x1+64x1,int8/1x0"; None is a float tensor ("-").

    Raises:
        SpecError: text of another form."""
    try:
        k, v = (None if part == "-" else _parsed(part) for part in text.split(","))
    except (ValueError, KeyError):
        change = "Pass a QuantizedTensor as k or v; it writes this text."
        raise spec_error("codes", described(text), "two entries dtype/TxC[+TxC] or -", change) from None
    return k, v


@lru_cache(maxsize=256)
def text_of(k: Codes | None, v: Codes | None) -> str:
    """The op's text argument, as `codes_of` reads it."""
    return ",".join("-" if x is None else str(x) for x in (k, v))


def _parsed(text: str) -> Codes:
    text, _, tables = text.partition(":")
    text, _, compute = text.partition("*")
    dtype, _, blocks = text.partition("/")
    KINDS[dtype], TABLE_BITS[tables or "float32"]
    scale, *shift = (Block(*map(int, part.split("x"))) for part in blocks.split("+"))
    return Codes(dtype, scale, shift[0] if shift else None, compute or "float", tables or "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How a tensor is quantised.

    Args:
        dtype: "int8", "int4" (packed, the even channel in the low half of a byte), "fp8_e4m3", "fp8_e5m2",
            "nf4" or "mxfp4" (blocks of 32 channels, scales that are powers of two).
        granularity: which elements share a scale. "tensor"; "head"; "token": a token's channels, or blocks
            of `channels` of them; "channel": a channel's tokens, or groups of `tokens` of them; "block":
            `tokens` by `channels`.
        tokens: tokens per block of "channel" and "block"; None is all of them.
        channels: channels per block of "token" and "block"; None is all of them.
        symmetric: codes stand for multiples of the scale. False (int8, int4): for steps from the least value
            to the greatest; the zero point is a float, so that a large mean costs no range.
        smoothing: "mean" takes each channel's mean over all tokens off before coding and returns it with the
            values; "block_mean" that of every 64 tokens.
        rotation: "hadamard" codes an orthogonal rotation of the channels, which spreads outliers. Attention
            rotates q for a rotated k, and rotates the result of a rotated v back.
        compute: "float": the products are those of the decoded values. "int8" (int8, int4), "fp8" (fp8_e4m3):
            a kernel may multiply codes, with q and the weights, or q alone, in that dtype for it: faster, at
            an error of theirs.
        tables: dtype of scales and shifts, "float32" or "bfloat16". In bfloat16 a scale is rounded up, by
            less than 0.8 %, and codes are those of what is stored: a zero point that is no bfloat16 widens
            its range by what the rounding moves it. Not with smoothing.

    Raises:
        SpecError: an unknown word, or a combination without a meaning."""

    dtype: str = "int8"
    granularity: str = "token"
    tokens: int | None = None
    channels: int | None = None
    symmetric: bool = True
    smoothing: str = "none"
    rotation: str = "none"
    compute: str = "float"
    tables: str = "float32"
    codes: Codes = field(init=False, repr=False, compare=False)  # their form, as kernels read them
    text: str = field(init=False, repr=False, compare=False)  # str(codes): a graph may know no numbers

    def __post_init__(self) -> None:
        words = {"dtype": KINDS, "granularity": GRANULARITIES, "smoothing": SMOOTHINGS, "rotation": ROTATIONS}
        words |= {"compute": COMPUTES, "tables": TABLE_BITS}
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                got, change = described(getattr(self, name)), "See the docstring of Scheme."
                raise spec_error(f"Scheme.{name}", got, f"one of {', '.join(allowed)}", change)
        for name, where in (("tokens", ("channel", "block")), ("channels", ("token", "block"))):
            size = getattr(self, name)
            if size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise spec_error(f"Scheme.{name}", described(size), "1 or more, or None", "None is all.")
            if self.granularity not in where:
                change = f"It sizes the blocks of {' and '.join(where)}."
                raise spec_error(f"Scheme.{name}", f"{size} with {self.granularity!r}", "None", change)
        if not self.symmetric:
            if not KINDS[self.dtype].levels:
                change = "Only int8 and int4 have a zero point."
                raise spec_error("Scheme.symmetric", f"False with {self.dtype}", "True", change)
            if self.smoothing != "none":
                change = "A zero point already moves the range to the values."
                raise spec_error("Scheme.smoothing", f"{self.smoothing!r}, asymmetric", "'none'", change)
        if self.smoothing != "none" and self.tables != "float32":
            change = "A mean is exact in float32 alone."
            raise spec_error("Scheme.tables", f"{self.tables} with smoothing", "'float32'", change)
        if self.compute != "float" and self.dtype not in MULTIPLIED[self.compute]:
            change = "Products of codes are of int8 and int4, or of fp8_e4m3."
            raise spec_error("Scheme.compute", f"{self.compute!r} with {self.dtype}", "'float'", change)
        if self.dtype == "mxfp4" and (self.granularity, self.channels) != ("token", MX_CHANNELS):
            change = f'Use granularity="token", channels={MX_CHANNELS}.'
            raise spec_error("Scheme.granularity", self.granularity, "blocks of 32 channels", change)

        object.__setattr__(self, "codes", self._codes())
        object.__setattr__(self, "text", str(self.codes))

    def _codes(self) -> Codes:
        blocks = {
            "tensor": Block(),
            "head": Block(),
            "token": Block(1, self.channels or _ALL),
            "channel": Block(self.tokens or _ALL, 1),
            "block": Block(self.tokens or _ALL, self.channels or _ALL),
        }
        scale = blocks[self.granularity]
        means = {"none": None, "mean": Block(_ALL, 1), "block_mean": Block(SMOOTHED_TOKENS, 1)}
        shift = means[self.smoothing] if self.symmetric else scale
        return Codes(self.dtype, scale, shift, self.compute, self.tables)

    @property
    def rotated_in_pass(self) -> bool:
        """Is the rotation a part of the pass that makes codes? A mean is one of rotated values."""
        return self.rotation != "none" and self.smoothing == "none"

    def bits_per_value(self, tokens: int, channels: int) -> float:
        """Bits of storage per element of a head of these sizes: codes, scales and shifts."""
        codes, size = self.codes, tokens * channels
        tables = [x.counts(tokens, channels) for x in (codes.scale, codes.shift) if x is not None]
        return KINDS[self.dtype].bits + TABLE_BITS[self.tables] * sum(a * b for a, b in tables) / max(1, size)


SMOOTHED_TOKENS = 64

_KEYS: dict[str, Any] = {"granularity": "channel", "tokens": 64, "tables": "bfloat16"}
_VALUES: dict[str, Any] = {"granularity": "token", "channels": MX_CHANNELS, "tables": "bfloat16"}
_STEPS: dict[str, Any] = {"dtype": "int4", "symmetric": False}
# Schemes by name, for K and for V: what caches and the command line offer.
NAMED = {
    "int8": (Scheme(), Scheme()),
    "int8-smooth": (Scheme(smoothing="mean"), Scheme()),
    "int8-channel": (Scheme(granularity="channel", tokens=64), Scheme()),
    "int4": (Scheme(**_STEPS, **_KEYS), Scheme(**_STEPS, **_VALUES)),
    "int4-token": (Scheme(**_STEPS, **_KEYS), Scheme(**_STEPS, tables="bfloat16")),
    "fp8": (Scheme(dtype="fp8_e4m3"), Scheme(dtype="fp8_e4m3")),
    "nf4": (Scheme(dtype="nf4", **_KEYS), Scheme(dtype="nf4", **_VALUES)),
    "mxfp4": (Scheme(dtype="mxfp4", **_VALUES), Scheme(dtype="mxfp4", **_VALUES)),
}
