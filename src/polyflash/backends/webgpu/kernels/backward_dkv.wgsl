// dv_j = sum_i p_ij * dout_i     dk_j = scale * sum_i ds_ij * q_i
//
// A key per thread, and the rows of all query heads of its kv head one block after the other: every sum has
// one owner and one order, so bits repeat without atomics.

var<workgroup> b_q: array<vec4<f32>, BN * D4>;
var<workgroup> b_dout: array<vec4<f32>, BN * DV4>;
var<workgroup> b_rows: array<vec2<f32>, BN>;  // lse, delta

fn load_tile(at: Place, h: u32, i0: u32, t: u32) {
  let first = at.q_base + h * n.q_rows + i0;
  for (var x = t; x < BN * D4; x += NT) {
    var w = vec4<f32>(0.0);
    if (i32(i0 + x / D4) < at.rows) { w = load_q(first * D4 + x); }
    b_q[x] = w;
  }
  for (var x = t; x < BN * DV4; x += NT) {
    var w = vec4<f32>(0.0);
    if (i32(i0 + x / DV4) < at.rows) { w = load_dout(first * DV4 + x); }
    b_dout[x] = w;
  }
  for (var x = t; x < BN; x += NT) {
    var w = vec2<f32>(EMPTY, 0.0);
    if (i32(i0 + x) < at.rows) { w = rows[first + x]; }
    b_rows[x] = w;
  }
}

// Rows [x, y) that may see a key of j0 .. j0 + NT - 1; x is a multiple of BN.
fn row_range(at: Place, j0: u32) -> vec2<u32> {
  let lo = max(0, i32(j0) - at.upper);
  let hi = min(at.rows, i32(j0 + NT) - at.lower);
  if (hi <= lo || i32(j0) >= at.kv_end) { return vec2<u32>(0u, 0u); }
  return vec2<u32>(u32(lo) / BN * BN, u32(hi));
}

// visible and change_score of four rows and one key.
fn visible_rows(at: Place, h: u32, i: i32, j: i32) -> vec4<bool> {
  return vec4<bool>(
    visible(at, h, i, j), visible(at, h, i + 1, j), visible(at, h, i + 2, j), visible(at, h, i + 3, j));
}

fn change_rows(at: Place, h: u32, i: i32, j: i32, s: vec4<f32>, on: vec4<bool>) -> vec4<f32> {
  return vec4<f32>(
    change_score(at, h, i, j, s.x, on.x), change_score(at, h, i + 1, j, s.y, on.y),
    change_score(at, h, i + 2, j, s.z, on.z), change_score(at, h, i + 3, j, s.w, on.w));
}

@compute @workgroup_size(NT)
fn backward_dkv(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
  var at = stand(vec3<u32>(group_id.x, group_id.y * n.group, group_id.z));
  let j0 = (n.tile0 + group_id.x) * NT;
  let j = j0 + t;
  let live = i32(j) < at.keys;

  var k: array<vec4<f32>, D4>;
  var v: array<vec4<f32>, DV4>;
  var acc_k: array<vec4<f32>, D4>;
  var acc_v: array<vec4<f32>, DV4>;
  if (live) {
    let key = key_of(at, j);
//: for d < D4
    k[{d}] = load_k(key * D4 + {d});
//: end
//: for c < DV4
    v[{c}] = load_v(key * DV4 + {c});
//: end
  }

  let range = row_range(at, j0);
  for (var g = 0u; g < n.group; g++) {
    let h = at.h + g;
    for (var i0 = range.x; i0 < range.y; i0 += BN) {
      workgroupBarrier();
      load_tile(at, h, i0, t);
      workgroupBarrier();
      for (var x = 0u; x < BN; x += 4u) {
        var s = vec4<f32>(0.0);
//: for d < D4
        s += vec4<f32>(
          dot(k[{d}], b_q[x * D4 + {d}]), dot(k[{d}], b_q[(x + 1u) * D4 + {d}]),
          dot(k[{d}], b_q[(x + 2u) * D4 + {d}]), dot(k[{d}], b_q[(x + 3u) * D4 + {d}]));
//: end
        var dp = vec4<f32>(0.0);
//: for c < DV4
        dp += vec4<f32>(
          dot(v[{c}], b_dout[x * DV4 + {c}]), dot(v[{c}], b_dout[(x + 1u) * DV4 + {c}]),
          dot(v[{c}], b_dout[(x + 2u) * DV4 + {c}]), dot(v[{c}], b_dout[(x + 3u) * DV4 + {c}]));
//: end
        let on = visible_rows(at, h, i32(i0 + x), i32(j));
        let changed = change_rows(at, h, i32(i0 + x), i32(j), s, on);
        let r0 = b_rows[x];
        let r1 = b_rows[x + 1u];
        let r2 = b_rows[x + 2u];
        let r3 = b_rows[x + 3u];
        let pairs = differentiate(
          s, changed, dp, vec4<f32>(r0.x, r1.x, r2.x, r3.x), vec4<f32>(r0.y, r1.y, r2.y, r3.y), on);
//: for y < FOUR
        if (pairs.on[{y}]) {
//: for c < DV4
          acc_v[{c}] += pairs.p[{y}] * b_dout[(x + {y}) * DV4 + {c}];
//: end
//: for d < D4
          acc_k[{d}] += pairs.ds[{y}] * b_q[(x + {y}) * D4 + {d}];
//: end
        }
//: end
      }
    }
  }
  if (live) {
    let key = key_of(at, j);
//: for d < D4
    dk[key * D4 + {d}] = store_dk(acc_k[{d}] * n.scale);
//: end
//: for c < DV4
    dv[key * DV4 + {c}] = store_dv(acc_v[{c}]);
//: end
  }
}
