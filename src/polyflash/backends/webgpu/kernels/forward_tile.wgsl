// Forward, a tile of BM rows per workgroup of TX x TY threads: a thread has RM rows, of each block of BN keys
// those at 4 * (tx + x * TX) .. + 3, and of the output the channels 4 * (tx + c * TX) .. + 3.
//
//     for block in block_range:  s = scale * q @ k.T;  apply_mask;  online_softmax;  rescale;  acc += p @ v
//     out = acc / l_i            lse = m_i + ln l_i

var<workgroup> b_q: array<vec4<f32>, BM * D4>;
var<workgroup> b_kv: array<vec4<f32>, BN * WIDEST4>;  // keys of a block, then its values
var<workgroup> b_p: array<vec4<f32>, BM * BN4>;
//: if SHARED
var<workgroup> b_rows: array<f32, BM * TX>;  // one number of each thread of a row
//: end

fn load_keys(at: Place, j0: u32, t: u32) {
  for (var x = t; x < BN * D4; x += NT) {
    let j = j0 + x / D4;
    var w = vec4<f32>(0.0);
    if (i32(j) < at.kv_end) { w = read_k(at, j, x % D4); }
    b_kv[x] = w;
  }
}

fn load_values(at: Place, j0: u32, t: u32) {
  for (var x = t; x < BN * DV4; x += NT) {
    let j = j0 + x / DV4;
    var w = vec4<f32>(0.0);
    if (i32(j) < at.kv_end) { w = read_v(at, j, x % DV4); }
    b_kv[x] = w;
  }
}

@compute @workgroup_size(NT)
fn forward_tile(
  @builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) t: u32,
) {
  let at = stand(group_id);
  let r0 = (n.tile0 + group_id.x) * BM;
  let tx = t % TX;
  let own = t / TX * RM;  // the thread's first row in the tile
  let count = row_count(at);

  for (var x = t; x < BM * D4; x += NT) {  // load_tile: q
    let r = r0 + x / D4;
    var w = vec4<f32>(0.0);
    if (r < count) { w = load_q(row_of(at, r) * D4 + x % D4); }
    b_q[x] = w;
  }
  var m_i: array<f32, RM>;
  var l_i: array<f32, RM>;  // of the thread's own keys; summed over the row at the end
  var acc: array<array<vec4<f32>, DC>, RM>;
//: for i < RM
  {
    let start = start_row(at, head_of(at, r0 + own + {i}));
    m_i[{i}] = start.x;
    l_i[{i}] = select(0.0, start.y, tx == 0u);
  }
//: end

  let keys = block_range(at, r0, BM);
  for (var j0 = keys.x; j0 < keys.y; j0 += BN) {
    workgroupBarrier();
    load_keys(at, j0, t);
    workgroupBarrier();
    var s = array<array<vec4<f32>, RN4>, RM>();
    for (var d = 0u; d < D4; d++) {
//: for x < RN4
      {
        let k0 = b_kv[((tx + {x} * TX) * 4u) * D4 + d];
        let k1 = b_kv[((tx + {x} * TX) * 4u + 1u) * D4 + d];
        let k2 = b_kv[((tx + {x} * TX) * 4u + 2u) * D4 + d];
        let k3 = b_kv[((tx + {x} * TX) * 4u + 3u) * D4 + d];
//: for i < RM
        {
          let w = b_q[(own + {i}) * D4 + d];
          s[{i}][{x}] += vec4<f32>(dot(w, k0), dot(w, k1), dot(w, k2), dot(w, k3));
        }
//: end
      }
//: end
    }

    let whole = sees_all(at, r0, BM, j0);
    var on: array<array<vec4<bool>, RN4>, RM>;
    var top: array<f32, RM>;
//: for i < RM
    {
      let h = head_of(at, r0 + own + {i});
      let i_q = position_of(at, r0 + own + {i});
      top[{i}] = LOWEST;
//: for x < RN4
      {
        let j = i32(j0 + (tx + {x} * TX) * 4u);
        on[{i}][{x}] = vec4<bool>(true);
        if (!whole) { on[{i}][{x}] = visible_four(at, h, i_q, j); }
        s[{i}][{x}] = change_four(at, h, i_q, j, s[{i}][{x}], on[{i}][{x}]);
        top[{i}] = max(top[{i}], largest(apply_mask(s[{i}][{x}], on[{i}][{x}], LOWEST)));
      }
//: end
//: if SHARED
      b_rows[(own + {i}) * TX + tx] = top[{i}];
//: end
    }
//: end
    workgroupBarrier();  // row maxima are there, and nobody reads keys any more
//: for i < RM
    {  // online_softmax
//: if SHARED
      for (var x = 0u; x < TX; x++) { top[{i}] = max(top[{i}], b_rows[(own + {i}) * TX + x]); }
//: else
      for (var lane = 1u; lane < TX; lane *= 2u) {
        top[{i}] = max(top[{i}], subgroupShuffleXor(top[{i}], lane));
      }
//: end
      let m_new = max(m_i[{i}], top[{i}]);
      let alpha = exp2((m_i[{i}] - m_new) * LOG2E);
      m_i[{i}] = m_new;
      var sum = 0.0;
//: for x < RN4
      {
        let p = apply_mask(exp2((s[{i}][{x}] - vec4<f32>(m_new)) * LOG2E), on[{i}][{x}], HIDDEN);
        b_p[(own + {i}) * BN4 + tx + {x} * TX] = p;
        sum += sum_seen(p);
      }
//: end
      l_i[{i}] = l_i[{i}] * alpha + sum;
//: for c < DC
      acc[{i}][{c}] *= alpha;  // rescale
//: end
    }
//: end
    load_values(at, j0, t);
    workgroupBarrier();
    // Sums of 16 keys are added up first: few roundings, however many keys there are.
    for (var x = 0u; x < BN4; x += FOUR) {
//: for c < DC
      {
        let column = min(tx + {c} * TX, DV4 - 1u);
        var part = array<vec4<f32>, RM>();
//: for y < FOUR
        {
          let v0 = b_kv[((x + {y}) * 4u) * DV4 + column];
          let v1 = b_kv[((x + {y}) * 4u + 1u) * DV4 + column];
          let v2 = b_kv[((x + {y}) * 4u + 2u) * DV4 + column];
          let v3 = b_kv[((x + {y}) * 4u + 3u) * DV4 + column];
//: for i < RM
          {
            let p = b_p[(own + {i}) * BN4 + x + {y}];
            if (whole) {
              part[{i}] += p.x * v0 + p.y * v1 + p.z * v2 + p.w * v3;
            } else {
              part[{i}] = add_seen(part[{i}], p.x, v0);
              part[{i}] = add_seen(part[{i}], p.y, v1);
              part[{i}] = add_seen(part[{i}], p.z, v2);
              part[{i}] = add_seen(part[{i}], p.w, v3);
            }
          }
//: end
        }
//: end
//: for i < RM
        acc[{i}][{c}] += part[{i}];
//: end
      }
//: end
    }
  }

//: if SHARED
  workgroupBarrier();
//: for i < RM
  b_rows[(own + {i}) * TX + tx] = l_i[{i}];
//: end
  workgroupBarrier();
//: end
//: for i < RM
  {  // finalize
    var l = 0.0;
//: if SHARED
    for (var x = 0u; x < TX; x++) { l += b_rows[(own + {i}) * TX + x]; }
//: else
    l = l_i[{i}];
    for (var lane = 1u; lane < TX; lane *= 2u) { l += subgroupShuffleXor(l, lane); }
//: end
    let r = r0 + own + {i};
    if (r < count) {
//: for c < DC
      if (tx + {c} * TX < DV4) { finalize(at, r, tx + {c} * TX, acc[{i}][{c}], l); }
//: end
      if (tx == 0u) { finalize_row(at, r, m_i[{i}], l); }
    }
  }
//: end
}
