// Dropout: which weights are kept, by Philox4x32-10 (Salmon et al., SC11), the same on every backend. Word key % 4 of
// the counter (key // 4, row, head + heads * batch, 0) under the seed's two halves is at least `drop_below`.

const TURN = vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
const FACTOR = vec2<u32>(0xd2511f53u, 0xcd9e8d57u);

// The upper halves of the products of x and FACTOR: WGSL has the lower ones alone.
fn upper_product(x: vec2<u32>) -> vec2<u32> {
  let half = vec2<u32>(16u);
  let low = vec2<u32>(0xffffu);
  let a = x & low;
  let b = x >> half;
  let c = FACTOR & low;
  let d = FACTOR >> half;
  let middle = b * c + ((a * c) >> half);
  return b * d + (middle >> half) + ((a * d + (middle & low)) >> half);
}

// Of keys j // 4 * 4 .. + 3.
fn keep(at: Place, h: u32, i: i32, j: i32) -> vec4<bool> {
  var w = vec4<u32>(u32(j) / 4u, u32(i), n.drop_head + at.b * n.drop_heads + h, 0u);
  var seed = vec2<u32>(n.seed_lo, n.seed_hi);
  for (var turn = 0u; turn < 10u; turn++) {
    let x = vec2<u32>(w.x, w.z);
    let upper = upper_product(x);
    let lower = x * FACTOR;
    w = vec4<u32>(upper.y ^ w.y ^ seed.x, lower.y, upper.x ^ w.w ^ seed.y, lower.x);
    seed += TURN;
  }
  return w >= vec4<u32>(n.drop_below);
}

fn keep_one(at: Place, h: u32, i: i32, j: i32) -> bool {
  return keep(at, h, i, j)[u32(j) % 4u];
}

// Weights of four keys, negative and halved where they are dropped: the sum of a row has those too. HIDDEN stays.
fn drop(at: Place, h: u32, i: i32, j: i32, p: vec4<f32>) -> vec4<f32> {
  return select(p * -0.5, p, keep(at, h, i, j) | (p < vec4<f32>(0.0)));
}

// What values are multiplied by.
fn kept_weights(p: vec4<f32>) -> vec4<f32> {
  let dropped = (p < vec4<f32>(0.0)) & (p != vec4<f32>(HIDDEN));
  return select(select(p * n.keep_scale, vec4<f32>(0.0), dropped), p, p == vec4<f32>(HIDDEN));
}
