"""The ladder: mappings of attention to threads, from a thread per output element to this engine's kernels.

    python -m benchmarks.webgpu.ladder --json build/ladder.json

The mappings of an earlier WGSL system, written anew: a thread per element; 256 threads for four outputs, 64
threads of which share the keys of one, where an output is an element or a row; a workgroup per row. And its
later steps, one at a time. float32, full rows; rates count 4 * rows * keys * head_dim operations per head,
however many a mapping repeats. Outputs are compared with float64.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.webgpu.timing import Clock, forward_error
from polyflash.backends.webgpu import configs, device, forward
from polyflash.backends.webgpu.calls import Sizes, call_of
from polyflash.backends.webgpu.device import Block, Command
from polyflash.backends.webgpu.render import NAGA, Buffer, Kernel
from polyflash.spec import Arguments

HEADS, DIM = 8, 64
SLOW = 60.0  # seconds that a mapping may take, as guessed from the size before
LONG = 0.4  # seconds of a dispatch that is timed once


class Mapping(NamedTuple):
    """`threads` share the keys of an output, `outputs` to a workgroup; an output is an element or a row."""

    unit: str
    threads: int
    outputs: int
    subgroup: bool = False
    vec4: bool = False
    fused: bool = False  # one tree for maxima and sums, four vectors of channels at a time
    half: bool = False  # q, k, v and out are float16
    row_per_workgroup: bool = False

    def kernel(self) -> Kernel:
        numbers = {**self._asdict(), "unit": self.unit == "row"}
        return _Text("main", (), _BUFFERS, tuple((name, int(x)) for name, x in numbers.items()), ())

    def lacks(self, limits: configs.Limits) -> bool:
        return (self.half and not limits.float16) or (self.subgroup and not limits.subgroup)

    def text(self, dialect: str = NAGA) -> str:
        return (_row_text if self.row_per_workgroup else _split_text)(self)


_BUFFERS = (Buffer("k", "f32"), Buffer("v", "f32"), Buffer("out", "f32", True))
ELEMENTS, ROWS = Mapping("element", 64, 4), Mapping("row", 64, 4)
MAPPINGS = {
    "a thread an element": Mapping("element", 1, 64),
    "256 threads, 4 elements, shared": ELEMENTS,
    "256 threads, 4 elements, subgroup": ELEMENTS._replace(subgroup=True),
    "256 threads, 4 rows, shared": ROWS,
    "256 threads, 4 rows, subgroup": ROWS._replace(subgroup=True),
    "a row a workgroup, shared": Mapping("row", 64, 1, row_per_workgroup=True),
    "a row a workgroup, subgroup": Mapping("row", 64, 1, True, row_per_workgroup=True),
    "a row a thread": Mapping("row", 1, 64),
    "4 rows, shared, and vec4 loads": ROWS._replace(vec4=True),
    "4 rows, shared, and 128 threads": ROWS._replace(threads=32),
    "4 rows, shared, and 64 threads": ROWS._replace(threads=16),
    "4 rows, shared, and fused barriers": ROWS._replace(fused=True),
    "4 rows, shared, and f16": ROWS._replace(half=True),
    "4 rows, subgroup, and vec4, fused, f16": ROWS._replace(subgroup=True, vec4=True, fused=True, half=True),
    "a row a thread, and vec4 loads": Mapping("row", 1, 64, vec4=True),
}


class _Text(Kernel):
    """A kernel of a mapping; its constants are the mapping's."""

    def text(self, dialect: str = NAGA) -> str:
        return _texts[self]


_texts: dict[Kernel, str] = {}


def _head(m: Mapping) -> str:
    scalar = "f16" if m.half else "f32"
    kind, width = (f"vec4<{scalar}>", DIM // 4) if m.vec4 else (scalar, DIM)
    wide = "vec4<f32>" if m.vec4 else "f32"
    product = "dot(q, k)" if m.vec4 else "q * k"
    return f"""{"enable f16;" if m.half else ""}
struct Params {{ rows: u32, keys: u32, scale: f32, unused: u32 }}
@group(0) @binding(0) var<uniform> n: Params;
@group(0) @binding(1) var<storage, read> b_q: array<{kind}>;
@group(0) @binding(2) var<storage, read> b_k: array<{kind}>;
@group(0) @binding(3) var<storage, read> b_v: array<{kind}>;
@group(0) @binding(4) var<storage, read_write> out: array<{kind}>;
const W = {width}u;  // loads of a row
fn score(row: u32, key: u32) -> f32 {{
  var s = 0.0;
  {_unrolled(width, f"let q = {wide}(b_q[row * W + d]); let k = {wide}(b_k[key * W + d]); s += {product};")}
  return s * n.scale;
}}
"""


def _unrolled(count: int, line: str) -> str:
    """A loop over d, eight turns in one: Mesa's lavapipe stops a kernel's loops after 65,535 turns of all."""
    step = min(8, count)
    lines = " ".join(f"{{ let d = d0 + {i}u; {line} }}" for i in range(step))
    return f"for (var d0 = 0u; d0 < {count}u; d0 += {step}u) {{ {lines} }}"


def _signature(threads: int, subgroup: bool) -> str:
    lanes = ", @builtin(subgroup_size) size: u32, @builtin(subgroup_invocation_id) place: u32"
    return f"""@compute @workgroup_size({threads})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32{lanes * subgroup}) {{
"""


def _split_text(m: Mapping) -> str:
    """`threads` have a piece of the keys each; then their maxima, sums and outputs are added up."""
    by_row, scalar = m.unit == "row", "f16" if m.half else "f32"
    wide, stored = ("vec4<f32>", f"vec4<{scalar}>") if m.vec4 and by_row else ("f32", scalar)
    count = (DIM // 4 if m.vec4 else DIM) if by_row else 1
    value = "b_v[(base + j) * W + d]" if by_row else "b_v[(base + j) * W + unit % W]"
    nt, row = m.threads * m.outputs, "unit" if by_row else f"unit / {DIM}u"
    text = _head(m) + (_trees(m, nt, wide) if m.threads > 1 else "") + _signature(nt, m.subgroup)
    text += f"""
  let T = {m.threads}u;
  let lane = t % T;
  let unit = group.x * {m.outputs}u + t / T;
  let row = {row};
  let base = group.y * n.keys;
  let row_q = group.y * n.rows + min(row, n.rows - 1u);
  let piece = (n.keys + T - 1u) / T;
  var m = -3.0e38;
  var l = 0.0;
  var acc: array<{wide}, {count}>;
  for (var j = min(lane * piece, n.keys); j < min((lane + 1u) * piece, n.keys); j++) {{
    let s = score(row_q, base + j);
    let m_new = max(m, s);
    let alpha = exp2(m - m_new);
    let p = exp2(s - m_new);
    m = m_new;
    l = l * alpha + p;
    {_unrolled(count, f"acc[d] = acc[d] * alpha + p * {wide}({value});")}
  }}
"""
    place = "row_q * W + d" if by_row else f"group.y * n.rows * {DIM}u + unit"
    if m.threads == 1:
        text += "  let whole = l;\n"
    elif m.fused and not m.subgroup:
        text += """  let both = total_both(t, lane, vec2<f32>(m, l));
  let whole = both.y;
  let factor = exp2(m - both.x);
"""
    else:
        text += """  let top = largest(t, lane, m SG);
  let factor = exp2(m - top);
  let whole = total(t, lane, l * factor SG);
"""
    step = 4 if m.fused and by_row else 1
    text += f"  for (var d0 = 0u; d0 < {count}u; d0 += {step}u) {{\n"
    names = [f"d0 + {i}u" for i in range(step)]
    if m.threads > 1:
        given = ", ".join(f"acc[{name}] * factor" for name in names)
        given = f"array<{wide}, 4>({given})" if step > 1 else given
        text += f"    let sums = total_{step}(t, lane, {given} SG);\n"
    else:
        text += "    let sums = acc[d0];\n"
    text += "    if (lane == 0u && row < n.rows) {\n"
    for i, name in enumerate(names):
        sums = f"sums[{i}]" if step > 1 else "sums"
        text += f"      {{ let d = {name}; out[{place}] = {stored}({sums} / whole); }}\n"
    text += "    }\n  }\n}\n"
    return text.replace(" SG", ", size, place" if m.subgroup else "")


def _trees(m: Mapping, nt: int, wide: str) -> str:
    """Reductions over the threads of an output: by subgroups and then workgroup memory, or a tree in it."""
    step = 4 if m.fused and m.unit == "row" else 1
    kind = f"array<{wide}, 4>" if step > 1 else wide
    text = f"var<workgroup> numbers: array<f32, {nt}>;\nvar<workgroup> parts: array<{kind}, {nt}>;\n"
    reductions = [("largest", "f32", "numbers", "max({0}, {1})", "subgroupMax", "-3.0e38")]
    reductions.append(("total", "f32", "numbers", "({0} + {1})", "subgroupAdd", "0.0"))
    if step == 1:
        reductions.append(("total_1", wide, "parts", "({0} + {1})", "subgroupAdd", f"{wide}(0.0)"))
    for name, of, array, join, subgroup, least in reductions:
        text += _reduction(m, name, of, array, join, subgroup, least)
    if step > 1:
        add = f"fn add(a: {kind}, b: {kind}) -> {kind} {{ return {kind}("
        add += ", ".join(f"a[{i}] + b[{i}]" for i in range(4)) + "); }\n"
        one = f"fn lanes_add(x: {kind}) -> {kind} {{ return {kind}("
        one += ", ".join(f"subgroupAdd(x[{i}])" for i in range(4)) + "); }\n"
        text += add + one * m.subgroup
        text += _reduction(m, "total_4", kind, "parts", "add({0}, {1})", "lanes_add", f"{kind}()")
    if m.fused and not m.subgroup:
        text += f"var<workgroup> pairs: array<vec2<f32>, {nt}>;\n"
        text += """fn join(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
  let top = max(a.x, b.x);
  return vec2<f32>(top, a.y * exp2(a.x - top) + b.y * exp2(b.x - top));
}
"""
        text += _reduction(m, "total_both", "vec2<f32>", "pairs", "join({0}, {1})", "", "")
    return text


def _reduction(m: Mapping, name: str, kind: str, array: str, join: str, subgroup: str, least: str) -> str:
    if m.subgroup:
        joined, end = join.format("all", f"{array}[i]"), f"t - lane + {m.threads}u"
        return f"""fn {name}(t: u32, lane: u32, x: {kind}, size: u32, place: u32) -> {kind} {{
  let own = {subgroup}(x);
  workgroupBarrier();
  if (place == 0u) {{ {array}[t] = own; }}
  workgroupBarrier();
  var all = {least};
  for (var i = t - lane; i < {end}; i += size) {{ all = {joined}; }}
  return all;
}}
"""
    return f"""fn {name}(t: u32, lane: u32, x: {kind}) -> {kind} {{
  workgroupBarrier();
  {array}[t] = x;
  workgroupBarrier();
  for (var far = {m.threads // 2}u; far > 0u; far /= 2u) {{
    if (lane < far) {{ {array}[t] = {join.format(f"{array}[t]", f"{array}[t + far]")}; }}
    workgroupBarrier();
  }}
  return {array}[t - lane];
}}
"""


def _row_text(m: Mapping) -> str:
    """A workgroup has a row: a key per thread for scores, a channel per thread for sums."""
    return (
        _head(m)
        + _trees(m, m.threads, "f32")
        + f"var<workgroup> weights: array<f32, {m.threads}>;\n"
        + _signature(m.threads, m.subgroup)
        + f"""
  let row_q = group.y * n.rows + group.x;
  let base = group.y * n.keys;
  var m = -3.0e38;
  var l = 0.0;
  var acc = 0.0;
  for (var j0 = 0u; j0 < n.keys; j0 += {m.threads}u) {{
    let j = j0 + t;
    var s = -3.0e38;
    if (j < n.keys) {{ s = score(row_q, base + j); }}
    let m_new = max(m, largest(t, t, s SG));
    let p = select(exp2(s - m_new), 0.0, j >= n.keys);
    let alpha = exp2(m - m_new);
    m = m_new;
    l = l * alpha + total(t, t, p SG);
    weights[t] = p;
    workgroupBarrier();
    acc *= alpha;
    for (var i = 0u; i < min({m.threads}u, n.keys - j0); i++) {{
      acc += weights[i] * f32(b_v[(base + j0 + i) * W + t]);
    }}
  }}
  out[row_q * W + t] = acc / l;
}}
""".replace(" SG", ", size, place" if m.subgroup else "")
    )


def measured(on: device.Device, clock: Clock, m: Mapping, length: int, arrays: Sequence[Any]) -> Any:
    kernel = m.kernel()
    _texts[kernel] = m.text()
    kind = np.float16 if m.half else np.float32
    blocks = [on.upload(x.astype(kind)) for x in arrays]
    out = on.empty(blocks[0].nbytes)
    params = struct.pack("IIfI", length, length, math.log2(math.e) / math.sqrt(DIM), 0)
    units = length if m.unit == "row" else length * DIM
    command = on.command(kernel, params, (-(-units // m.outputs), HEADS, 1))
    return _timed(on, clock, (command,), (*blocks, out), kind, arrays)


def ours(on: device.Device, clock: Clock, v: configs.Variant, length: int, arrays: Sequence[Any]) -> Any:
    sizes = Sizes(1, HEADS, HEADS, length, length, DIM, DIM)
    call = call_of(sizes, Arguments())
    given = [on.upload(call.words), *map(on.upload, arrays), on.empty(arrays[0].nbytes)]
    import torch

    commands = tuple(forward.walk(on, sizes, call, forward.Plan(v), torch.float32, False))
    return _timed(on, clock, commands, given, np.float32, arrays)


def _timed(
    on: device.Device,
    clock: Clock,
    commands: Sequence[Command],
    blocks: Sequence[Block],
    kind: Any,
    arrays: Sequence[Any],
) -> dict[str, float]:
    def work(one: bool = False) -> None:
        for command in commands:
            on.record(command._replace(grid=(1, 1, 1)) if one else command, blocks)

    clock.of(lambda: work(one=True))  # compiles
    shape, walls, done = arrays[0].shape, list[float](), on.empty(4)

    def walled() -> None:
        began = time.perf_counter()
        work()
        on.read(done)
        walls.append(time.perf_counter() - began)

    walled()
    out = on.read(blocks[-1]).view(kind).reshape(shape)
    error = forward_error((arrays[0], arrays[1], arrays[2]), out, None, False)
    seconds = walls[0]
    if seconds < LONG:
        for _ in range(4):
            walled()
        seconds = clock.median(work)
    rate = 4 * HEADS * shape[2] ** 2 * DIM / seconds / 1e9
    wall = sorted(walls)[len(walls) // 2]
    return {"wall_ms": wall * 1e3, "ms": seconds * 1e3, "GFLOP/s": rate, "error": error}


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    made.add_argument("--json", type=Path, default=Path("build/ladder.json"), metavar="FILE")
    made.add_argument("--lengths", default="128,2048")
    made.add_argument(
        "--filter", nargs="+", default=[""], metavar="WORD", help="arms with one of these words"
    )
    options = made.parse_args(argv)
    on = device.current()
    clock, rows, wrong = Clock(on), [], 0
    before: dict[str, float] = {}
    print(device.described())
    for length in map(int, options.lengths.split(",")):
        random = np.random.default_rng(0)
        arrays = [random.standard_normal((1, HEADS, length, DIM), np.float32) for _ in range(3)]
        arms: dict[str, Any] = {**MAPPINGS}
        d4 = DIM // 4
        arms |= {f"ours: {configs.title(v)}": v for v in configs.variants((d4, d4), on.limits)}
        for name, arm in arms.items():
            lacks = isinstance(arm, Mapping) and arm.lacks(on.limits)
            if lacks or not any(word in name for word in options.filter):
                continue
            if before.get(name, 0.0) > SLOW:
                print(f"{length:5d}  {name:42s} left out: too slow here", flush=True)
                continue
            how = measured if isinstance(arm, Mapping) else ours
            row = {"length": length, "name": name, **how(on, clock, arm, length, arrays)}
            before[name] = row["ms"] / 1e3 * (2048 / length) ** 2
            wrong += row["error"] > (5e-3 if isinstance(arm, Mapping) and arm.half else 1e-5)
            rows.append(row)
            words = f"{row['wall_ms']:10.3f} ms wall {row['ms']:10.3f} ms {row['GFLOP/s']:10.2f} GFLOP/s"
            print(f"{length:5d}  {name:42s}{words}  error {row['error']:.1e}", flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"adapter": device.described(), "rows": rows}, indent=1), encoding="utf-8"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
