// Forward, a tile of BM rows per workgroup of TX x TY threads: a thread has RM rows, of each block of BN keys
// those at 4 * (tx + x * TX) .. + 3, and of the output the channels 4 * (tx + c * TX) .. + 3.
//
//     for block in block_range:  s = scale * q @ k.T;  apply_mask;  online_softmax;  rescale;  acc += p @ v
//     out = acc / l_i            lse = m_i + ln l_i

// Rows lie in workgroup memory with those of a thread TY apart, keys with the four of a vector BN4 apart, and
// vectors of a key are permuted by it, or its row is of an odd length: what the threads of a row read at a time is
// then in different banks.

var<workgroup> b_q: array<vec4<f32>, BM * D4>;
var<workgroup> b_kv: array<vec4<f32>, BN * WIDEST4>;  // keys of a block, then its values
var<workgroup> b_p: array<vec4<f32>, BM * BN4>;
//: if SHARED
var<workgroup> b_rows: array<f32, BM * TX>;  // one number of each thread of a row
//: end

fn key_at(row: u32, d: u32) -> u32 {
  return row * KEY4 + (d ^ (row & SWIRL));
}

fn load_keys(at: Place, j0: u32, t: u32) {
//: for y < K_TURNS
  {
    let x = t + {y} * NT;
    let j = x / D4;
    let w = read_k(at, u32(min(i32(j0 + j), at.kv_end - 1)), x % D4);
    if (K_TURNS * NT == BN * D4 || x < BN * D4) {
      b_kv[key_at(j % 4u * BN4 + j / 4u, x % D4)] = select(vec4<f32>(0.0), w, i32(j0 + j) < at.kv_end);
    }
  }
//: end
}

fn load_values(at: Place, j0: u32, t: u32) {
//: for y < V_TURNS
  {
    let x = t + {y} * NT;
    let j = i32(j0 + x / DV4);
    let w = read_v(at, u32(min(j, at.kv_end - 1)), x % DV4);
    if (V_TURNS * NT == BN * DV4 || x < BN * DV4) {
      b_kv[x] = select(vec4<f32>(0.0), w, j < at.kv_end);
    }
  }
//: end
}

@compute @workgroup_size(NT)
fn forward_tile(
  @builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) t: u32,
) {
  let at = stand(group_id.x, group_id.z);
  let r0 = first_row(at, group_id.y);
  let tx = t % TX;
  let ty = t / TX;
  let own = ty * RM;  // the thread's first row in the tile
  let count = row_count(at);

  for (var x = t; x < BM * D4; x += NT) {  // load_tile: q
    let r = r0 + x / D4;
    var w = vec4<f32>(0.0);
    if (r < count) { w = load_q(row_of(at, r) * D4 + x % D4); }
    b_q[(x / D4 % RM * TY + x / D4 / RM) * D4 + x % D4] = w;
  }
  var m_i: array<f32, RM>;
  var l_i: array<f32, RM>;
  var acc: array<array<vec4<f32>, DC>, RM>;
  var whole_acc: array<array<vec4<f32>, DC>, RM>;  // of the stretches of keys before, under the maximum whole_m
  var whole_m: array<f32, RM>;
  var whole_l: array<f32, RM>;
//: for i < RM
  {
    let start = start_row(at, head_of(at, r0 + own + {i}));
    m_i[{i}] = start.x;
    l_i[{i}] = start.y;
    whole_m[{i}] = start.x;
    whole_l[{i}] = 0.0;
  }
//: end

  let keys = block_range(at, r0, BM);
  for (var from_key = keys.x; from_key < keys.y; from_key += STRETCH) {
    for (var j0 = from_key; j0 < min(from_key + STRETCH, keys.y); j0 += BN) {
      workgroupBarrier();
      load_keys(at, j0, t);
      workgroupBarrier();
      var s = array<array<vec4<f32>, RN4>, RM>();
      for (var d = 0u; d < D4; d++) {
        var w: array<vec4<f32>, RM>;
//: for i < RM
        w[{i}] = b_q[({i} * TY + ty) * D4 + d];
//: end
//: for x < RN4
//: for y < FOUR
        {
          let k = b_kv[key_at({y} * BN4 + tx + {x} * TX, d)];
//: for i < RM
          s[{i}][{x}][{y}] = add_dot(s[{i}][{x}][{y}], w[{i}], k);
//: end
        }
//: end
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
        let alpha = share(m_i[{i}] - m_new);
        m_i[{i}] = m_new;
//: for x < RN4
        {
          let p = apply_mask(exp2((s[{i}][{x}] - vec4<f32>(m_new)) * LOG2E), on[{i}][{x}], HIDDEN);
//: if DROPOUT
          let h = head_of(at, r0 + own + {i});
          let i_q = position_of(at, r0 + own + {i});
          b_p[({i} * TY + ty) * BN4 + tx + {x} * TX] = drop(at, h, i_q, i32(j0 + (tx + {x} * TX) * 4u), p);
//: else
          b_p[({i} * TY + ty) * BN4 + tx + {x} * TX] = p;
//: end
        }
//: end
        l_i[{i}] *= alpha;
        if (alpha != 1.0) {  // rescale: the maximum of a row is soon found
//: for c < DC
          acc[{i}][{c}] *= alpha;
//: end
        }
      }
//: end
      load_values(at, j0, t);
      workgroupBarrier();
      for (var x = 0u; x < BN4; x++) {
        var p: array<vec4<f32>, RM>;
//: for i < RM
        p[{i}] = b_p[({i} * TY + ty) * BN4 + x];
        l_i[{i}] = add_weights(l_i[{i}], p[{i}]);  // by every thread of the row, as it adds up outputs
//: if DROPOUT
        p[{i}] = kept_weights(p[{i}]);
//: end
//: end
//: for c < DC
        {
          let column = min(tx + {c} * TX, DV4 - 1u);
//: for y < FOUR
          {
            let v = b_kv[(x * 4u + {y}) * DV4 + column];
            if (whole) {
//: for i < RM
              acc[{i}][{c}] = fma(vec4<f32>(p[{i}][{y}]), v, acc[{i}][{c}]);
//: end
            } else {
//: for i < RM
              acc[{i}][{c}] = add_seen(acc[{i}][{c}], p[{i}][{y}], v);
//: end
            }
          }
//: end
        }
//: end
      }
    }
//: for i < RM
    {  // merge
      let factor = share(whole_m[{i}] - m_i[{i}]);
      whole_m[{i}] = m_i[{i}];
      whole_l[{i}] = whole_l[{i}] * factor + l_i[{i}];
      l_i[{i}] = 0.0;
//: for c < DC
      whole_acc[{i}][{c}] = whole_acc[{i}][{c}] * factor + acc[{i}][{c}];
      acc[{i}][{c}] = vec4<f32>(0.0);
//: end
    }
//: end
  }

//: for i < RM
  {  // finalize
    let l = whole_l[{i}] + l_i[{i}];  // l_i is 0, or the sink of a row without keys
    let r = r0 + own + {i};
    if (r < count) {
//: for c < DC
      if (tx + {c} * TX < DV4) { finalize(at, r, tx + {c} * TX, whole_acc[{i}][{c}], l); }
//: end
      if (tx == 0u) { finalize_row(at, r, m_i[{i}], l); }
    }
  }
//: end
}
