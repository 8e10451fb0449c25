// Forward, a row per thread: q and out stay in registers, and every thread of a workgroup of NT rows reads
// the same key at the same time. No thread waits for another's number. Fits any device: a block has as many
// keys as workgroup memory has room for, down to one group of four.

@compute @workgroup_size(NT)
fn forward_row(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
  let at = stand(group_id);
  let r0 = (n.tile0 + group_id.x) * NT;
  let r = r0 + t;
  let live = r < row_count(at);
  let h = head_of(at, r);
  let i = position_of(at, r);

  var q: array<vec4<f32>, D4>;
  var acc: array<vec4<f32>, DV4>;
  if (live) {
    let from_row = row_of(at, r) * D4;
//: for d < D4
    q[{d}] = load_q(from_row + {d});
//: end
  }
  let start = start_row(at, h);
  var m_i = start.x;
  var l_i = start.y;

  let keys = block_range(at, r0, NT);
  for (var j0 = keys.x; j0 < keys.y; j0 += BN) {
    workgroupBarrier();
    load_tile(at, j0, t);
    workgroupBarrier();
    let whole = sees_all(at, r0, NT, j0);
    for (var x = 0u; x < BN; x += 4u) {
      var s = vec4<f32>(0.0);
//: for d < D4
      s += vec4<f32>(
        dot(q[{d}], b_k[x * D4 + {d}]), dot(q[{d}], b_k[(x + 1u) * D4 + {d}]),
        dot(q[{d}], b_k[(x + 2u) * D4 + {d}]), dot(q[{d}], b_k[(x + 3u) * D4 + {d}]));
//: end
      var on = vec4<bool>(true);
      if (!whole) { on = visible_four(at, h, i, i32(j0 + x)); }
      s = change_four(at, h, i, i32(j0 + x), s, on);
      // online_softmax
      let m_new = max(m_i, largest(apply_mask(s, on, LOWEST)));
      let alpha = exp2((m_i - m_new) * LOG2E);
      let p = apply_mask(exp2((s - vec4<f32>(m_new)) * LOG2E), on, HIDDEN);
      m_i = m_new;
      l_i = l_i * alpha + sum_seen(p);
      if (whole) {
//: for c < DV4
        acc[{c}] = acc[{c}] * alpha + p.x * b_v[x * DV4 + {c}] + p.y * b_v[(x + 1u) * DV4 + {c}]
          + p.z * b_v[(x + 2u) * DV4 + {c}] + p.w * b_v[(x + 3u) * DV4 + {c}];
//: end
      } else {
//: for c < DV4
        acc[{c}] *= alpha;  // rescale
        acc[{c}] = add_seen(acc[{c}], p.x, b_v[x * DV4 + {c}]);
        acc[{c}] = add_seen(acc[{c}], p.y, b_v[(x + 1u) * DV4 + {c}]);
        acc[{c}] = add_seen(acc[{c}], p.z, b_v[(x + 2u) * DV4 + {c}]);
        acc[{c}] = add_seen(acc[{c}], p.w, b_v[(x + 3u) * DV4 + {c}]);
//: end
      }
    }
  }
  if (live) {
//: for c < DV4
    finalize(at, r, {c}, acc[{c}], l_i);
//: end
    finalize_row(at, r, m_i, l_i);
  }
}
