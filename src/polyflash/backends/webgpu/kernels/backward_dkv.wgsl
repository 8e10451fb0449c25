// dv_j = sum_i p_ij * dout_i     dk_j = scale * sum_i ds_ij * q_i
//
// Keys in registers, as forward_row has rows, and the rows of all query heads of their kv head one block after the
// other: every sum has one owner and one order, so bits repeat without atomics.

var<workgroup> b_q: array<vec4<f32>, BN * D4>;
var<workgroup> b_dout: array<vec4<f32>, BN * DV4>;
var<workgroup> b_rows: array<vec2<f32>, BN>;  // lse, delta

fn load_tile(at: Place, h: u32, i0: u32, t: u32) {
  let first = at.q_base + h * n.q_rows;
//: for y < K_TURNS
  {
    let x = t + {y} * NT;
    let i = i32(i0 + x / D4);
    let w = load_q((first + u32(min(i, at.rows - 1))) * D4 + x % D4);
    if (K_TURNS * NT == BN * D4 || x < BN * D4) { b_q[x] = select(vec4<f32>(0.0), w, i < at.rows); }
  }
//: end
//: for y < V_TURNS
  {
    let x = t + {y} * NT;
    let i = i32(i0 + x / DV4);
    let w = load_dout((first + u32(min(i, at.rows - 1))) * DV4 + x % DV4);
    if (V_TURNS * NT == BN * DV4 || x < BN * DV4) { b_dout[x] = select(vec4<f32>(0.0), w, i < at.rows); }
  }
//: end
  for (var x = t; x < BN; x += NT) {
    var w = vec2<f32>(EMPTY, 0.0);
    if (i32(i0 + x) < at.rows) { w = rows[first + i0 + x]; }
    b_rows[x] = w;
  }
}

// Rows [x, y) that may see a key of j0 .. j0 + BM - 1; x is a multiple of BN.
fn row_range(at: Place, j0: u32) -> vec2<u32> {
  let lo = max(0, i32(j0) - at.upper);
  let hi = min(at.rows, i32(j0 + BM) - at.lower);
  if (hi <= lo || i32(j0) >= at.kv_end) { return vec2<u32>(0u, 0u); }
  return vec2<u32>(u32(lo) / BN * BN, u32(hi));
}

// Does every key of j0 .. j0 + BM - 1 see every row of i0 .. i0 + BN - 1?
fn seen_by_all(at: Place, j0: u32, i0: u32) -> bool {
//: if ELEMENTS
  return false;
//: else
  let last = min(i32(j0 + BM), at.keys) - 1;  // keys beyond the last are stored nowhere
  return i32(i0 + BN) <= at.rows && i32(j0) >= at.kv_start && last < at.kv_end
    && i32(j0) >= i32(i0 + BN) - 1 + at.lower && last <= i32(i0) + at.upper;
//: end
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

//: if DROPOUT
fn keep_rows(at: Place, h: u32, i: i32, j: i32) -> vec4<bool> {
  var kept: vec4<bool>;
  for (var y = 0; y < 4; y++) { kept[y] = keep_one(at, h, i + y, j); }
  return kept;
}

//: end
@compute @workgroup_size(NT)
fn backward_dkv(
  @builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) t: u32,
//: if SUBGROUPS
  @builtin(subgroup_invocation_id) place: u32,
//: end
) {
  var at = stand(group_id.x * n.group, group_id.z);
  let j0 = (n.tile0 + group_id.y) * BM;
  let lane = t % LANES;
  let first = j0 + t / LANES * RM;  // the thread's keys
  let own = first + lane * RM / LANES;  // those whose scores it has: OWN
//: if SUBGROUPS
  let lane0 = place - lane;
//: else
  let lane0 = 0u;
//: end

  var k: array<array<vec4<f32>, WIDTH>, RM>;
  var v: array<array<vec4<f32>, WIDTH_V>, RM>;
  var acc_k: array<array<vec4<f32>, WIDTH>, RM>;
  var acc_v: array<array<vec4<f32>, WIDTH_V>, RM>;
//: for i < RM
  if (i32(first + {i}) < at.keys) {
    let key = key_of(at, first + {i});
//: for d < WIDTH
    k[{i}][{d}] = load_k(key * D4 + lane + {d} * LANES);
//: end
//: for c < WIDTH_V
    v[{i}][{c}] = load_v(key * DV4 + lane + {c} * LANES);
//: end
  }
//: end

  let range = row_range(at, j0);
  for (var g = 0u; g < n.group; g++) {
    let h = at.h + g;
    for (var i0 = range.x; i0 < range.y; i0 += BN) {
      workgroupBarrier();
      load_tile(at, h, i0, t);
      workgroupBarrier();
      let whole = seen_by_all(at, j0, i0);
      for (var x = 0u; x < BN; x += 4u) {
        var s: array<vec4<f32>, RM>;
        var dp: array<vec4<f32>, RM>;
//: for i < RM
        s[{i}] = vec4<f32>(0.0);
        dp[{i}] = vec4<f32>(0.0);
//: end
//: for d < WIDTH
//: for y < FOUR
        {
          let w = b_q[(x + {y}) * D4 + lane + {d} * LANES];
//: for i < RM
          s[{i}][{y}] = add_dot(s[{i}][{y}], k[{i}][{d}], w);
//: end
        }
//: end
//: end
//: for c < WIDTH_V
//: for y < FOUR
        {
          let w = b_dout[(x + {y}) * DV4 + lane + {c} * LANES];
//: for i < RM
          dp[{i}][{y}] = add_dot(dp[{i}][{y}], v[{i}][{c}], w);
//: end
        }
//: end
//: end
        fold_rows(&s, lane);
        fold_rows(&dp, lane);
        let r0 = b_rows[x];
        let r1 = b_rows[x + 1u];
        let r2 = b_rows[x + 2u];
        let r3 = b_rows[x + 3u];
        var seen: array<f32, OWN>;
//: for o < OWN
        {
          let j = i32(own + {o});
          var on = vec4<bool>(true);
          if (!whole) { on = visible_rows(at, h, i32(i0 + x), j); }
          let w = of_alike(s[{o}]);
          let pairs = differentiate(
            w, change_rows(at, h, i32(i0 + x), j, w, on), of_alike(dp[{o}]),
//: if DROPOUT
            vec4<f32>(r0.x, r1.x, r2.x, r3.x), vec4<f32>(r0.y, r1.y, r2.y, r3.y), on,
            keep_rows(at, h, i32(i0 + x), j));
//: else
            vec4<f32>(r0.x, r1.x, r2.x, r3.x), vec4<f32>(r0.y, r1.y, r2.y, r3.y), on);
//: end
          s[{o}] = pairs.p;
          dp[{o}] = pairs.ds;
          seen[{o}] = pairs.seen;
        }
//: end
        var p: array<vec4<f32>, RM>;
        var ds: array<vec4<f32>, RM>;
//: for i < RM
        p[{i}] = from_owner(s[{i} % OWN], lane0, {i});
        ds[{i}] = from_owner(dp[{i} % OWN], lane0, {i});
//: end
        if (whole) {
//: for y < FOUR
//: for c < WIDTH_V
          {
            let w = b_dout[(x + {y}) * DV4 + lane + {c} * LANES];
//: for i < RM
            acc_v[{i}][{c}] = fma(vec4<f32>(p[{i}][{y}]), w, acc_v[{i}][{c}]);
//: end
          }
//: end
//: for d < WIDTH
          {
            let w = b_q[(x + {y}) * D4 + lane + {d} * LANES];
//: for i < RM
            acc_k[{i}][{d}] = fma(vec4<f32>(ds[{i}][{y}]), w, acc_k[{i}][{d}]);
//: end
          }
//: end
//: end
        } else {
//: for i < RM
          {
            let on = unpacked(number_from_owner(seen[{i} % OWN], lane0, {i}));
//: for y < FOUR
            if (on[{y}]) {
//: for c < WIDTH_V
              acc_v[{i}][{c}] += p[{i}][{y}] * b_dout[(x + {y}) * DV4 + lane + {c} * LANES];
//: end
//: for d < WIDTH
              acc_k[{i}][{d}] += ds[{i}][{y}] * b_q[(x + {y}) * D4 + lane + {d} * LANES];
//: end
            }
//: end
          }
//: end
        }
      }
    }
  }
//: for i < RM
  if (i32(first + {i}) < at.keys) {
    let key = key_of(at, first + {i});
//: for d < WIDTH
    dk[key * D4 + lane + {d} * LANES] = store_dk(acc_k[{i}][{d}] * n.scale);
//: end
//: for c < WIDTH_V
    dv[key * DV4 + lane + {c} * LANES] = store_dv(acc_v[{i}][{c}]);
//: end
  }
//: end
}
