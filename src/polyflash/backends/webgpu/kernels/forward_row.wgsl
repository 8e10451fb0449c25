// Forward, rows in registers: LANES threads share RM rows, and each has the channels 4 * (lane + c * LANES) ..
// + 3 of q and of out. Every thread of a workgroup reads the same keys at the same time; what is read once from
// workgroup memory serves RM rows. With one lane no thread waits for another's number, and it fits any device:
// a block has as many keys as workgroup memory has room for, down to one group of four.
//
// Scores of four keys are sums over the lanes. They are halved: with each exchange a lane gives half of its rows
// away and adds what it gets to the others, until a row is left whose scores it has alone. So nothing of the
// softmax is done twice; weights come back by shuffles.

@compute @workgroup_size(NT)
fn forward_row(
  @builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) t: u32,
//: if SUBGROUPS
  @builtin(subgroup_invocation_id) place: u32,
//: end
) {
  let at = stand(group_id);
  let r0 = (n.tile0 + group_id.x) * BM;
  let count = row_count(at);
  let lane = t % LANES;
  let first = r0 + t / LANES * RM;  // the thread's rows
  let own = first + lane * RM / LANES;  // those whose scores it has: OWN
//: if SUBGROUPS
  let lane0 = place - lane;
//: end

  var q: array<array<vec4<f32>, WIDTH>, RM>;
  var acc: array<array<vec4<f32>, WIDTH_V>, RM>;
//: for i < RM
  if (first + {i} < count) {
    let from_row = row_of(at, first + {i}) * D4 + lane;
//: for d < WIDTH
    q[{i}][{d}] = load_q(from_row + {d} * LANES);
//: end
  }
//: end
  var m_i: array<f32, OWN>;
  var l_i: array<f32, OWN>;
//: for o < OWN
  {
    let start = start_row(at, head_of(at, own + {o}));
    m_i[{o}] = start.x;
    l_i[{o}] = start.y;
  }
//: end

  let keys = block_range(at, r0, BM);
  var next: Fetched;
//: if EARLY
  if (keys.x < keys.y) { fetch_tile(at, keys.x, t, &next); }
//: end
  for (var j0 = keys.x; j0 < keys.y; j0 += BN) {
//: if EARLY
//: else
    fetch_tile(at, j0, t, &next);
//: end
    workgroupBarrier();
    store_tile(t, &next);
    workgroupBarrier();
//: if EARLY
    fetch_tile(at, j0 + BN, t, &next);
//: end
    let whole = sees_all(at, r0, BM, j0);
    for (var x = 0u; x < BN; x += 4u) {
      var s: array<vec4<f32>, RM>;
//: for i < RM
      s[{i}] = vec4<f32>(0.0);
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
//: if HALF1
      {
        let upper = (lane & FAR1) != 0u;
//: for i < HALF1
        {
          let given = select(s[{i} + HALF1], s[{i}], upper);
          s[{i}] = select(s[{i}], s[{i} + HALF1], upper) + subgroupShuffleXor(given, FAR1);
        }
//: end
      }
//: end
//: if HALF2
      {
        let upper = (lane & FAR2) != 0u;
//: for i < HALF2
        {
          let given = select(s[{i} + HALF2], s[{i}], upper);
          s[{i}] = select(s[{i}], s[{i} + HALF2], upper) + subgroupShuffleXor(given, FAR2);
        }
//: end
      }
//: end
//: if HALF3
      {
        let upper = (lane & FAR3) != 0u;
        let given = select(s[1], s[0], upper);
        s[0] = select(s[0], s[1], upper) + subgroupShuffleXor(given, FAR3);
      }
//: end
//: if ALIKE
      for (var far = ALIKE; far > 0u; far /= 2u) {  // lanes that have the same row
//: for o < OWN
        s[{o}] += subgroupShuffleXor(s[{o}], far);
//: end
      }
//: end
      var alpha: array<f32, OWN>;
//: for o < OWN
      {
        let h = head_of(at, own + {o});
        let i = position_of(at, own + {o});
        var on = vec4<bool>(true);
        if (!whole) { on = visible_four(at, h, i, i32(j0 + x)); }
        let w = change_four(at, h, i, i32(j0 + x), s[{o}], on);
        // online_softmax
        let m_new = max(m_i[{o}], largest(apply_mask(w, on, LOWEST)));
        alpha[{o}] = exp2((m_i[{o}] - m_new) * LOG2E);
        s[{o}] = apply_mask(exp2((w - vec4<f32>(m_new)) * LOG2E), on, HIDDEN);
        m_i[{o}] = m_new;
        l_i[{o}] = l_i[{o}] * alpha[{o}] + sum_seen(s[{o}]);
      }
//: end
      var p: array<vec4<f32>, RM>;
//: for i < RM
      {
//: if SUBGROUPS
        p[{i}] = subgroupShuffle(s[{i} % OWN], lane0 + {i} * LANES / RM);
        let factor = subgroupShuffle(alpha[{i} % OWN], lane0 + {i} * LANES / RM);
//: else
        p[{i}] = s[{i}];
        let factor = alpha[{i}];
//: end
        if (factor != 1.0) {  // rescale: the maximum of a row is soon found
//: for c < WIDTH_V
          acc[{i}][{c}] *= factor;
//: end
        }
      }
//: end
      if (whole) {
//: for c < WIDTH_V
//: for y < FOUR
        {
          let v = b_v[(x + {y}) * DV4 + lane + {c} * LANES];
//: for i < RM
          acc[{i}][{c}] = fma(vec4<f32>(p[{i}][{y}]), v, acc[{i}][{c}]);
//: end
        }
//: end
//: end
      } else {
//: for c < WIDTH_V
//: for y < FOUR
        {
          let v = b_v[(x + {y}) * DV4 + lane + {c} * LANES];
//: for i < RM
          acc[{i}][{c}] = add_seen(acc[{i}][{c}], p[{i}][{y}], v);
//: end
        }
//: end
//: end
      }
    }
  }
//: for i < RM
  {
//: if SUBGROUPS
    let l = subgroupShuffle(l_i[{i} % OWN], lane0 + {i} * LANES / RM);
//: else
    let l = l_i[{i}];
//: end
    if (first + {i} < count) {
//: for c < WIDTH_V
      finalize(at, first + {i}, lane + {c} * LANES, acc[{i}][{c}], l);
//: end
    }
  }
//: end
//: for o < OWN
  if (lane % OWNERS == 0u && own + {o} < count) { finalize_row(at, own + {o}, m_i[{o}], l_i[{o}]); }
//: end
}
