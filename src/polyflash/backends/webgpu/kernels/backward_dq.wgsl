// dq = scale * sum_j ds_ij * k_j, with rows in registers as forward_row has them.

@compute @workgroup_size(NT)
fn backward_dq(
  @builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) t: u32,
//: if SUBGROUPS
  @builtin(subgroup_invocation_id) place: u32,
//: end
) {
  let at = stand(group_id.x, group_id.z);
  let r0 = first_row(at, group_id.y);
  let count = row_count(at);
  let lane = t % LANES;
  let first = r0 + t / LANES * RM;  // the thread's rows
  let own = first + lane * RM / LANES;  // those whose scores it has: OWN
//: if SUBGROUPS
  let lane0 = place - lane;
//: else
  let lane0 = 0u;
//: end

  var q: array<array<vec4<f32>, WIDTH>, RM>;
  var dout: array<array<vec4<f32>, WIDTH_V>, RM>;
  var acc: array<array<vec4<f32>, WIDTH>, RM>;
//: for i < RM
  if (first + {i} < count) {
    let row = row_of(at, first + {i});
//: for d < WIDTH
    q[{i}][{d}] = load_q(row * D4 + lane + {d} * LANES);
//: end
//: for c < WIDTH_V
    dout[{i}][{c}] = load_dout(row * DV4 + lane + {c} * LANES);
//: end
  }
//: end
  var given: array<vec2<f32>, OWN>;
//: for o < OWN
  given[{o}] = vec2<f32>(EMPTY, 0.0);
  if (own + {o} < count) { given[{o}] = rows[row_of(at, own + {o})]; }
//: end

  let keys = block_range(at, r0, BM);
  var part: Fetched;
  for (var j0 = keys.x; j0 < keys.y; j0 += BN) {
    fetch_tile(at, j0, t, &part);
    workgroupBarrier();
    store_tile(t, &part);
    workgroupBarrier();
    let whole = sees_all(at, r0, BM, j0);
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
        let k = b_k[(x + {y}) * D4 + lane + {d} * LANES];
//: for i < RM
        s[{i}][{y}] = add_dot(s[{i}][{y}], q[{i}][{d}], k);
//: end
      }
//: end
//: end
//: for c < WIDTH_V
//: for y < FOUR
      {
        let v = b_v[(x + {y}) * DV4 + lane + {c} * LANES];
//: for i < RM
        dp[{i}][{y}] = add_dot(dp[{i}][{y}], dout[{i}][{c}], v);
//: end
      }
//: end
//: end
      fold_rows(&s, lane);
      fold_rows(&dp, lane);
      var seen: array<f32, OWN>;
//: for o < OWN
      {
        let i = position_of(at, own + {o});
        var on = vec4<bool>(true);
        if (!whole) { on = visible_four(at, at.h, i, i32(j0 + x)); }
        let w = of_alike(s[{o}]);
        let changed = change_four(at, at.h, i, i32(j0 + x), w, on);
//: if DROPOUT
        let kept = keep(at, at.h, i, i32(j0 + x));
        let pairs = differentiate(
          w, changed, of_alike(dp[{o}]), vec4<f32>(given[{o}].x), vec4<f32>(given[{o}].y), on, kept);
//: else
        let pairs = differentiate(
          w, changed, of_alike(dp[{o}]), vec4<f32>(given[{o}].x), vec4<f32>(given[{o}].y), on);
//: end
        s[{o}] = pairs.ds;
        seen[{o}] = pairs.seen;
      }
//: end
      var ds: array<vec4<f32>, RM>;
//: for i < RM
      ds[{i}] = from_owner(s[{i} % OWN], lane0, {i});
//: end
      if (whole) {
//: for d < WIDTH
//: for y < FOUR
        {
          let k = b_k[(x + {y}) * D4 + lane + {d} * LANES];
//: for i < RM
          acc[{i}][{d}] = fma(vec4<f32>(ds[{i}][{y}]), k, acc[{i}][{d}]);
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
//: for d < WIDTH
            acc[{i}][{d}] += ds[{i}][{y}] * b_k[(x + {y}) * D4 + lane + {d} * LANES];
//: end
          }
//: end
        }
//: end
      }
    }
  }
//: for i < RM
  if (first + {i} < count) {
    let row = row_of(at, first + {i}) * D4 + lane;
//: for d < WIDTH
    dq[row + {d} * LANES] = store_dq(acc[{i}][{d}] * n.scale);
//: end
  }
//: end
}
