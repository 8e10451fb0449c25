"""WGSL text of a kernel: the files of kernels/, with what a call fixes written out.

A line that opens with `//:` is for this module alone:

    //: for x < N    ...    //: end     repeats its lines with `{x}` as 0u, 1u, ...; a loop where N is large
    //: if A         ...    //: else    ...    //: end     keeps one of two; A is the name of a constant

A file with `{side}` in it is written out for k and for v, `{SIDE}` being K and V; likewise with `{table}`.

Registers are arrays, and a compiler keeps an array in registers if it is only indexed by constants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "kernels"
ENTRY_WORDS = 9  # of a batch entry or packed member in `words`; see `Place`
NAGA, DAWN = "naga", "dawn"  # compilers: that of wgpu, and that of Chromium
# naga offers subgroup operations without a directive, and refuses the line that Dawn demands.
WITH_SUBGROUPS = {NAGA: "", DAWN: "enable subgroups;"}
_WORDS = {"side": ("k", "v"), "table": ("scale", "shift")}
EMPTY = 3.0e38  # as lse, a row that saw no key

# What a vector of four channels is in a buffer, how it is read as vec4<f32>, and how it is written.
_HALF = "vec4<f32>(unpack2x16float({0}.x), unpack2x16float({0}.y))"
_BFLOAT = (
    "bitcast<vec4<f32>>(vec4<u32>({0}.x << 16u, {0}.x & 0xffff0000u, {0}.y << 16u, {0}.y & 0xffff0000u))"
)
STORED = {
    "float32": ("vec4<f32>", "{0}", "{0}"),
    "float16": ("vec2<u32>", _HALF, "vec2<u32>(pack2x16float({0}.xy), pack2x16float({0}.zw))"),
    "bfloat16": ("vec2<u32>", _BFLOAT, "vec2<u32>(pack_bf16({0}.xy), pack_bf16({0}.zw))"),
    "float16 of the device": ("vec4<f16>", "vec4<f32>({0})", "vec4<f16>({0})"),
    "sums": ("vec4<f32>", "{0}", "{0}"),
}
# bfloat16 has the upper half of float32: round to nearest, ties to even; a NaN stays one.
_PACK_BF16 = """
fn pack_bf16(x: vec2<f32>) -> u32 {
  let w = bitcast<vec2<u32>>(x);
  let rounded = (w + vec2<u32>(0x7fffu) + ((w >> vec2<u32>(16u)) & vec2<u32>(1u))) >> vec2<u32>(16u);
  let is_nan = (w & vec2<u32>(0x7fffffffu)) > vec2<u32>(0x7f800000u);
  let kept = select(rounded, vec2<u32>(0x7fc0u), is_nan);
  return kept.x | (kept.y << 16u);
}
"""


class Buffer(NamedTuple):
    """A storage buffer of a kernel: four channels of a dtype, or numbers of a row."""

    name: str
    kind: str  # a name in STORED, or a WGSL type
    written: bool = False


class Kernel(NamedTuple):
    """Everything a pipeline is made of; calls of equal kernels share one. No length is in it."""

    name: str  # its entry point
    files: tuple[str, ...]  # of kernels/, in order
    buffers: tuple[Buffer, ...]
    constants: tuple[tuple[str, int], ...]
    params: tuple[tuple[str, str], ...]  # fields of the uniform `n`, with their types
    unrolled: int = 32  # repetitions of `//: for` at most; of more a loop is made

    def text(self, dialect: str = NAGA) -> str:
        return text_of(self, dialect)


def source(file: str) -> str:
    return (FOLDER / file).read_text(encoding="utf-8")


@lru_cache(maxsize=512)
def text_of(kernel: Kernel, dialect: str) -> str:
    constants = dict(kernel.constants)
    parts = [
        *_enabled(kernel, constants, dialect),
        f"// {kernel.name}, generated from {', '.join(kernel.files)}",
    ]
    parts += [f"const {name}: u32 = {value}u;" for name, value in constants.items()]
    parts += [f"const ENTRY_WORDS: u32 = {ENTRY_WORDS}u;", f"const EMPTY: f32 = {EMPTY};"]
    fields = "".join(f"  {name}: {kind},\n" for name, kind in kernel.params)
    parts += [f"struct Params {{\n{fields}}}", "@group(0) @binding(0) var<uniform> n: Params;"]
    parts.append("@group(0) @binding(1) var<storage, read> words: array<u32>;")
    for place, buffer in enumerate(kernel.buffers, 2):
        parts.append(_declared(place, buffer))
    if any(buffer.kind == "bfloat16" for buffer in kernel.buffers):
        parts.append(_PACK_BF16)
    for file in kernel.files:
        for text in _written_out(source(file)):
            parts += expand(iter(text.splitlines()), constants, kernel.unrolled)
    return "\n".join(parts) + "\n"


def _written_out(text: str) -> Iterator[str]:
    """The text of a file, once for each word that stands for a `{side}` or a `{table}`."""
    for hole, words in _WORDS.items():
        if f"{{{hole}}}" in text:
            for word in words:
                own = text.replace(f"{{{hole}}}", word).replace(f"{{{hole.upper()}}}", word.upper())
                yield from _written_out(own)
            return
    yield text


def _enabled(kernel: Kernel, constants: Mapping[str, int], dialect: str) -> Iterator[str]:
    """Directives."""
    if any(buffer.kind == "float16 of the device" for buffer in kernel.buffers):
        yield "enable f16;"
    if constants.get("SUBGROUPS") and WITH_SUBGROUPS[dialect]:
        yield WITH_SUBGROUPS[dialect]


def _declared(place: int, buffer: Buffer) -> str:
    stored = STORED.get(buffer.kind)
    kind, load, store = stored or (buffer.kind, "", "")
    access = "read_write" if buffer.written else "read"
    name = buffer.name
    text = f"@group(0) @binding({place}) var<storage, {access}> {name}: array<{kind}>;"
    if stored is None:
        return text
    if buffer.written:
        return f"{text}\nfn store_{name}(x: vec4<f32>) -> {kind} {{ return {store.format('x')}; }}"
    read = load.format("w")
    widened = f"fn widened_{name}(w: {kind}) -> vec4<f32> {{ return {read}; }}"
    loaded = f"fn load_{name}(at: u32) -> vec4<f32> {{ return widened_{name}({name}[at]); }}"
    return "\n".join((text, f"alias In_{name} = {kind};", widened, loaded))


def expand(lines: Iterator[str], constants: Mapping[str, int], unrolled: int) -> list[str]:
    """The lines up to the end of the text, with every `//:` obeyed."""
    return _block(lines, constants, unrolled)[0]


def _block(lines: Iterator[str], constants: Mapping[str, int], unrolled: int) -> tuple[list[str], str]:
    """Lines up to the `end` or `else` of the block they are in, and which it was; "" at the end of a file."""
    kept: list[str] = []
    for line in lines:
        if not line.startswith("//:"):
            kept.append(line)
            continue
        word, _, rest = line[3:].strip().partition(" ")
        if word in ("end", "else"):
            return kept, word
        inner, closed = _block(lines, constants, unrolled)
        if word == "for":
            kept += _repeated(rest, inner, constants, unrolled)
            continue
        other: list[str] = []
        if closed == "else":
            other, _ = _block(lines, constants, unrolled)
        kept += inner if constants.get(rest) else other
    return kept, ""


def _repeated(rest: str, inner: list[str], constants: Mapping[str, int], unrolled: int) -> Iterator[str]:
    name, _, bound = rest.partition(" < ")
    count, hole = constants[bound], re.compile(rf"\{{{name}\}}")
    if count > unrolled:
        yield f"for (var {name} = 0u; {name} < {bound}; {name}++) {{"
        yield from (hole.sub(name, line) for line in inner)
        yield "}"
        return
    for x in range(count):
        yield from (hole.sub(f"{x}u", line) for line in inner)
