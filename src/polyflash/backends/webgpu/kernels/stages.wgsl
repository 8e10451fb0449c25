// What every kernel shares: whose rows and keys these are, and what a score becomes before the softmax.
// Scores are natural ones, s = scale * q.k; a weight is exp2((s - m_i) * LOG2E). Nothing here waits.

const LOG2E: f32 = 1.4426950408889634;
const LEAST: f32 = 1.1754944e-38;  // as a share
const LOWEST: f32 = -3.4028234e38;  // stands for "no score yet"; whether there is one, l_i says
const MINUS_INFINITY: u32 = 0xff800000u;
const HIDDEN: f32 = -1.0;  // stands in a tile of weights for a pair that is not seen: 0 times a NaN is a NaN

// One batch entry or packed member, of `rows` rows and `keys` keys: row i sees keys j of [kv_start, kv_end) with i + lower <= j <= i + upper.
struct Place {
  b: u32, h: u32, hk: u32, split: u32,
  q_base: u32, k_base: u32, rows: i32, keys: i32, kv_start: i32, kv_end: i32, lower: i32, upper: i32, offset: i32,
}

// Where a workgroup stands: its head (packed, its kv head) and split are x of its number, its tile y, its entry z.
// Tiles of all heads alternate, so that with causal masks those of few keys are the last of all to start.
fn stand(x: u32, depth: u32) -> Place {
  let b = n.z0 + depth;
  let w = b * ENTRY_WORDS;
  var at: Place;
  at.b = b;
//: if SPLIT
  at.split = x % n.num_splits;
  let head = x / n.num_splits;
//: else
  let head = x;
//: end
//: if PACK
  at.hk = head;
  at.h = head * n.group;
//: else
  at.h = head;
  at.hk = head / n.group;
//: end
  at.q_base = words[w];
  at.k_base = words[w + 1u];
  at.rows = bitcast<i32>(words[w + 2u]);
  at.keys = bitcast<i32>(words[w + 3u]);
  at.kv_start = bitcast<i32>(words[w + 4u]);
  at.kv_end = bitcast<i32>(words[w + 5u]);
  at.lower = bitcast<i32>(words[w + 6u]);
  at.upper = bitcast<i32>(words[w + 7u]);
  at.offset = bitcast<i32>(words[w + 8u]);
  return at;
}

// Rows of a tile: positions of one head, or, packed, those of all heads of a kv head.
fn row_count(at: Place) -> u32 {
//: if PACK
  return u32(at.rows) * n.group;
//: else
  return u32(at.rows);
//: end
}

fn position_of(at: Place, r: u32) -> i32 {
//: if PACK
  return i32(r / n.group);
//: else
  return i32(r);
//: end
}

fn head_of(at: Place, r: u32) -> u32 {
//: if PACK
  return at.h + r % n.group;
//: else
  return at.h;
//: end
}

// First row of tile y. The last rows come first: of causal ones they see most keys, and what takes longest should not
// be left for the end.
fn first_row(at: Place, y: u32) -> u32 {
  return ((row_count(at) + BM - 1u) / BM - 1u - n.tile0 - y) * BM;
}

// Where row r stands in q, out and lse, in rows; it must be one of the call.
fn row_of(at: Place, r: u32) -> u32 {
  return at.q_base + head_of(at, r) * n.q_rows + u32(position_of(at, r));
}

// Where key j stands in k and v, in rows. Of pages k_base is where in `words` the numbers of the entry's own begin.
//: if PAGE
fn page_of(at: Place, j: u32) -> u32 {
  return words[at.k_base + j / PAGE] * n.kv_heads + at.hk;
}

fn key_of(at: Place, j: u32) -> u32 {
  return page_of(at, j) * PAGE + j % PAGE;
}
//: else
fn key_of(at: Place, j: u32) -> u32 {
  return at.k_base + at.hk * n.k_rows + j;
}
//: end

// Keys [x, y) that a row of r0 .. r0 + rows - 1 may see; x is a multiple of BN.
fn block_range(at: Place, r0: u32, rows: u32) -> vec2<u32> {
  let count = row_count(at);
  if (r0 >= count) { return vec2<u32>(0u, 0u); }
  let lo = max(at.kv_start, position_of(at, r0) + at.lower);
  let hi = min(at.kv_end, position_of(at, min(r0 + rows, count) - 1u) + at.upper + 1);
  if (hi <= lo) { return vec2<u32>(0u, 0u); }
//: if SPLIT
  // an equal part: with causal masks, windows and ragged lengths parts of all keys would be full or empty
  let from_key = u32(lo) / BN * BN;
  let part = (u32(hi) - from_key + n.num_splits * BN - 1u) / (n.num_splits * BN) * BN;
  let x = from_key + at.split * part;
  return vec2<u32>(x, max(x, min(x + part, u32(hi))));
//: else
  return vec2<u32>(u32(lo) / BN * BN, u32(hi));
//: end
}

// Does every row of r0 .. r0 + rows - 1 see every key of j0 .. j0 + BN - 1? Asked of whole blocks, so that
// all but those at an edge skip apply_mask.
fn sees_all(at: Place, r0: u32, rows: u32, j0: u32) -> bool {
//: if ELEMENTS
  return false;
//: else
  let end = i32(j0 + BN);  // rows beyond the last are stored nowhere, so they may see anything
  let first = position_of(at, r0);
  let last = position_of(at, min(r0 + rows, row_count(at)) - 1u);
  return i32(j0) >= at.kv_start && end <= at.kv_end && i32(j0) >= last + at.lower
    && end - 1 <= first + at.upper;
//: end
}

fn visible(at: Place, h: u32, i: i32, j: i32) -> bool {
  var on = i < at.rows && j >= max(at.kv_start, i + at.lower) && j < at.kv_end && j <= i + at.upper;
//: if ELEMENTS
  if (on) {
//: if MASK
    let m = at.b * n.mask_b + h * n.mask_h + u32(i) * n.mask_q + u32(j) * n.mask_k;
    on = on && ((words[n.mask + m / 4u] >> (m % 4u * 8u)) & 0xffu) != 0u;
//: end
//: if BIAS
    on = on && words[bias_at(at, h, i, j)] != MINUS_INFINITY;
//: end
//: if SEGMENTS
    on = on && words[n.q_ids + at.b * n.q_rows + u32(i)] == words[n.k_ids + at.b * n.k_rows + u32(j)];
//: end
  }
//: end
  return on;
}

//: if BIAS
fn bias_at(at: Place, h: u32, i: i32, j: i32) -> u32 {
  return n.bias + at.b * n.bias_b + h * n.bias_h + u32(i) * n.bias_q + u32(j) * n.bias_k;
}
//: end

//: if SOFTCAP
// tanh with a relative error of float32's own size: of small x the quotient would lose every bit.
fn tanh_of(x: f32) -> f32 {
  let y = abs(x);
  let z = x * x;
  let e = exp2(-2.0 * LOG2E * y);
  let series = y * (1.0 + z * (-0.33333333333 + z * (0.13333333333 + z * (-0.05396825397
    + z * (0.02186948854 + z * -0.00886323552)))));
  return sign(x) * select((1.0 - e) / (1.0 + e), series, y < 0.25);
}
//: end

// s after soft cap, bias and ALiBi; of a pair that is not seen, any number.
fn change_score(at: Place, h: u32, i: i32, j: i32, dot_product: f32, on: bool) -> f32 {
  var s = dot_product * n.scale;
//: if SOFTCAP
  s = n.softcap * tanh_of(s / n.softcap);
//: end
//: if BIAS
  if (on) { s += bitcast<f32>(words[bias_at(at, h, i, j)]); }
//: end
//: if ALIBI
  s -= bitcast<f32>(words[n.slopes + at.b * n.slopes_b + h]) * abs(f32(i + at.offset - j));
//: end
  return s;
}

fn change_four(at: Place, h: u32, i: i32, j: i32, s: vec4<f32>, on: vec4<bool>) -> vec4<f32> {
//: if CHANGED
  return vec4<f32>(
    change_score(at, h, i, j, s.x, on.x), change_score(at, h, i, j + 1, s.y, on.y),
    change_score(at, h, i, j + 2, s.z, on.z), change_score(at, h, i, j + 3, s.w, on.w));
//: else
  return s * n.scale;
//: end
}

fn visible_four(at: Place, h: u32, i: i32, j: i32) -> vec4<bool> {
  return vec4<bool>(
    visible(at, h, i, j), visible(at, h, i, j + 1), visible(at, h, i, j + 2), visible(at, h, i, j + 3));
}

fn apply_mask(s: vec4<f32>, on: vec4<bool>, hidden: f32) -> vec4<f32> {
  return select(vec4<f32>(hidden), s, on);
}

// x + a . b, in multiplications that add: a compiler makes one more instruction of a dot product and a sum.
fn add_dot(x: f32, a: vec4<f32>, b: vec4<f32>) -> f32 {
  return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, x))));
}

fn largest(s: vec4<f32>) -> f32 {
  return max(max(s.x, s.y), max(s.z, s.w));
}

// x and the weights that are seen, a NaN too, of which a comparison of floats may say anything; added up as `add_seen` adds outputs, so that roundings are alike.
fn add_weights(x: f32, p: vec4<f32>) -> f32 {
  let hidden = bitcast<vec4<u32>>(p) == vec4<u32>(bitcast<u32>(HIDDEN));
//: if DROPOUT
  let seen = select(max(p, p * -2.0), vec4<f32>(0.0), hidden);
//: else
  let seen = select(p, vec4<f32>(0.0), hidden);
//: end
  return (((x + seen.x) + seen.y) + seen.z) + seen.w;
}

// x + p * v of a pair, x alone if it is not seen.
fn add_seen(x: vec4<f32>, p: f32, v: vec4<f32>) -> vec4<f32> {
  return select(x + p * v, x, vec4<bool>(bitcast<u32>(p) == bitcast<u32>(HIDDEN)));
}

// What older sums keep when their maximum is d below the new one: not 0, as 0 times an infinity would be NaN.
fn share(d: f32) -> f32 {
  let x = exp2(d * LOG2E);
  return select(x, LEAST, x < LEAST);
}

// A sink starts its row: m_i and l_i.
fn start_row(at: Place, h: u32) -> vec2<f32> {
//: if SINKS
  let sink = words[n.sinks + h];
  if (at.split == 0u && sink != MINUS_INFINITY) { return vec2<f32>(bitcast<f32>(sink), 1.0); }
//: end
  return vec2<f32>(LOWEST, 0.0);
}

// A weight that is not finite comes of a NaN: SwiftShader's exp2 of one is infinite, its log of one a number.
fn lse_of(m_i: f32, l_i: f32) -> f32 {
  let finite = (bitcast<u32>(l_i) & 0x7f800000u) != 0x7f800000u;
  let lse = select(bitcast<f32>(n.minus_infinity | 0x400000u), m_i + log(l_i), finite);  // or NaN
  return select(lse, bitcast<f32>(n.minus_infinity), l_i == 0.0);
}

fn over(acc: vec4<f32>, l_i: f32) -> vec4<f32> {
  return select(acc / l_i, vec4<f32>(0.0), vec4<bool>(l_i == 0.0));
}
