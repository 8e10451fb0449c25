// q and the keys as integers of 8 bits, for forward_row, of codes that may be multiplied as they are:
//
//     q . k = (sum q8 * k8) * unit * k_scale + q . k_shift        unit: the row's largest number / 127
//
// Four products and their sum are one instruction. A sum of 512 of them is a float without a rounding.

const LEAST_ROW: f32 = 1e-35;  // below which codes are coarser: 127 / it is finite

struct Row { q: array<u32, WIDTH>, unit: f32, moved: f32 }

fn of_lanes(x: vec2<f32>) -> vec2<f32> {
  var all = x;
//: if SUBGROUPS
  for (var far = LANES / 2u; far > 0u; far /= 2u) {
    let other = subgroupShuffleXor(all, far);
    all = vec2<f32>(max(all.x, other.x), all.y + other.y);
  }
//: end
  return all;
}

// Row r of q, of which a thread has the channels that it has of keys; zeros beyond the last row.
fn load_row(at: Place, r: u32, lane: u32, inside: bool) -> Row {
  var row: Row;
  var x: array<vec4<f32>, WIDTH>;
  var stats = vec2<f32>(LEAST_ROW, 0.0);
  var known = 1.0;
//: for d < WIDTH
  x[{d}] = vec4<f32>(0.0);
  if (inside) { x[{d}] = load_q(row_of(at, r) * D4 + lane + {d} * LANES); }
  stats.x = max(stats.x, largest(abs(x[{d}])));
  if (any((bitcast<vec4<u32>>(x[{d}]) & vec4<u32>(0x7f800000u)) == vec4<u32>(0x7f800000u))) { known = 0.0; }
//: if K_SHIFT
  stats.y = add_dot(stats.y, x[{d}], k_shift(at, 0u, lane + {d} * LANES));
//: end
//: end
  stats = of_lanes(stats);
  let finite = of_lanes(vec2<f32>(1.0 - known, 0.0)).x == 0.0;
//: for d < WIDTH
  row.q[{d}] = pack4xI8(vec4<i32>(clamp(round(x[{d}] * (127.0 / stats.x)), vec4<f32>(-127.0), vec4<f32>(127.0))));
//: end
  row.unit = select(bitcast<f32>(n.minus_infinity | 0x400000u), stats.x / 127.0, finite);  // or NaN
  row.moved = stats.y;
  return row;
}
