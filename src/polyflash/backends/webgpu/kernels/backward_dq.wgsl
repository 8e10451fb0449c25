// dq = scale * sum_j ds_ij * k_j, a row per thread, as forward_row walks keys.

@compute @workgroup_size(NT)
fn backward_dq(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
  let at = stand(group_id);
  let r0 = (n.tile0 + group_id.x) * NT;
  let live = r0 + t < row_count(at);
  let i = i32(r0 + t);

  var q: array<vec4<f32>, D4>;
  var dout: array<vec4<f32>, DV4>;
  var acc: array<vec4<f32>, D4>;
  var given = vec2<f32>(EMPTY, 0.0);
  if (live) {
    let row = row_of(at, r0 + t);
//: for d < D4
    q[{d}] = load_q(row * D4 + {d});
//: end
//: for c < DV4
    dout[{c}] = load_dout(row * DV4 + {c});
//: end
    given = rows[row];
  }

  let keys = block_range(at, r0, NT);
  var next: Fetched;
  for (var j0 = keys.x; j0 < keys.y; j0 += BN) {
    fetch_tile(at, j0, t, &next);
    workgroupBarrier();
    store_tile(t, &next);
    workgroupBarrier();
    let whole = sees_all(at, r0, NT, j0);
    for (var x = 0u; x < BN; x += 4u) {
      var s = vec4<f32>(0.0);
//: for d < D4
      s += vec4<f32>(
        dot(q[{d}], b_k[x * D4 + {d}]), dot(q[{d}], b_k[(x + 1u) * D4 + {d}]),
        dot(q[{d}], b_k[(x + 2u) * D4 + {d}]), dot(q[{d}], b_k[(x + 3u) * D4 + {d}]));
//: end
      var dp = vec4<f32>(0.0);
//: for c < DV4
      dp += vec4<f32>(
        dot(dout[{c}], b_v[x * DV4 + {c}]), dot(dout[{c}], b_v[(x + 1u) * DV4 + {c}]),
        dot(dout[{c}], b_v[(x + 2u) * DV4 + {c}]), dot(dout[{c}], b_v[(x + 3u) * DV4 + {c}]));
//: end
      var on = vec4<bool>(true);
      if (!whole) { on = visible_four(at, at.h, i, i32(j0 + x)); }
      let changed = change_four(at, at.h, i, i32(j0 + x), s, on);
      let pairs = differentiate(s, changed, dp, vec4<f32>(given.x), vec4<f32>(given.y), on);
//: for y < FOUR
      if (pairs.on[{y}]) {
//: for d < D4
        acc[{d}] += pairs.ds[{y}] * b_k[(x + {y}) * D4 + {d}];
//: end
      }
//: end
    }
  }
  if (live) {
    let row = row_of(at, r0 + t);
//: for d < D4
    dq[row * D4 + {d}] = store_dq(acc[{d}] * n.scale);
//: end
  }
}
