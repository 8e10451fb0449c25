"""Mappings of attention to threads, from a thread per output element on: the ladder to this engine's kernels.

Those of an earlier WGSL system, written anew: a thread per element; 256 threads for four outputs, 64 threads
of which share the keys of one, where an output is an element or a row; a workgroup per row. And its later
steps, one at a time. float32 unless it says f16, full rows of head_dim 64.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from benchmarks import Shape
from polyflash.backends.webgpu import configs
from polyflash.backends.webgpu.render import NAGA, Buffer, Kernel

DIM = 64


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
        buffers = Buffer("k", "f32"), Buffer("v", "f32"), Buffer("out", "f32", True)
        return Text("main", (self.text(),), buffers, (), ())

    def launch(self, shape: Shape) -> tuple[bytes, tuple[int, int, int]]:
        """Parameters and workgroups of a dispatch."""
        scale = math.log2(math.e) / math.sqrt(DIM)
        units = shape.seqlen * (1 if self.unit == "row" else DIM)
        params = struct.pack("IIfI", shape.seqlen, shape.seqlen, scale, 0)
        return params, (-(-units // self.outputs), shape.batch * shape.heads, 1)

    def lacks(self, limits: configs.Limits) -> bool:
        return (self.half and not limits.float16) or (self.subgroup and not limits.subgroup)

    def text(self) -> str:
        return (_row_text if self.row_per_workgroup else _split_text)(self)


class Text(Kernel):
    """A kernel of its own text, which stands in place of files."""

    def text(self, dialect: str = NAGA) -> str:
        return self.files[0]


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
