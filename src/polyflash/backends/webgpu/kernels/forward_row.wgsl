// Forward, rows in registers, which threads share as in lanes.wgsl; keys and values come through workgroup memory,
// where every thread reads the same ones at the same time. With one lane no thread waits for another's number, and
// it fits any device: a block has as many keys as there is room for, down to one group of four.
//
// Sums of a stretch of keys are merged into `whole`: a sum of all keys would have a rounding for each of them. Splits
// are short, so they do without.

@compute @workgroup_size(NT)
fn forward_row(
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

//: if PRODUCTS
  var q: array<array<u32, WIDTH>, RM>;
  var acc: array<array<vec4<f32>, WIDTH_V>, RM>;
  var unit: array<f32, OWN>;
  var moved: array<f32, OWN>;
//: for i < RM
  {
    let row = load_row(at, first + {i}, lane, first + {i} < count);
    q[{i}] = row.q;
//: for o < OWN
    if (lane * RM / LANES + {o} == {i}) {
      unit[{o}] = row.unit;
      moved[{o}] = row.moved;
    }
//: end
  }
//: end
//: else
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
//: end
//: if SPLIT
//: else
  var whole_acc: array<array<vec4<f32>, WIDTH_V>, RM>;  // of the stretches before, under the maximum whole_m
  var whole_m: array<f32, OWN>;
  var whole_l: array<f32, OWN>;
//: end
  var m_i: array<f32, OWN>;
  var l_i: array<f32, OWN>;
//: for o < OWN
  {
    let start = start_row(at, head_of(at, own + {o}));
    m_i[{o}] = start.x;
    l_i[{o}] = start.y;
//: if SPLIT
//: else
    whole_m[{o}] = start.x;
    whole_l[{o}] = 0.0;
//: end
  }
//: end

  let keys = block_range(at, r0, BM);
  var part: Fetched;
//: if PACK
  if (keys.x < keys.y) { fetch_tile(at, keys.x, t, &part); }
//: end
//: if SPLIT
  {
    for (var j0 = keys.x; j0 < keys.y; j0 += BN) {
//: else
  for (var from_key = keys.x; from_key < keys.y; from_key += STRETCH) {
    for (var j0 = from_key; j0 < min(from_key + STRETCH, keys.y); j0 += BN) {
//: end
//: if PACK
      workgroupBarrier();
      store_tile(t, &part);
      workgroupBarrier();
      if (j0 + BN < keys.y) { fetch_tile(at, j0 + BN, t, &part); }  // few rows wait for memory: it is on its way
//: else
      fetch_tile(at, j0, t, &part);
      workgroupBarrier();
      store_tile(t, &part);
      workgroupBarrier();
//: end
      let whole = sees_all(at, r0, BM, j0);
      for (var x = 0u; x < BN; x += 4u) {
        var s: array<vec4<f32>, RM>;
//: if PRODUCTS
        var sums = array<vec4<i32>, RM>();
//: else
//: for i < RM
        s[{i}] = vec4<f32>(0.0);
//: end
//: end
//: for d < WIDTH
//: for y < FOUR
        {
          let k = b_k[(x + {y}) * D4 + lane + {d} * LANES];
//: for i < RM
//: if PRODUCTS
          sums[{i}][{y}] += dot4I8Packed(q[{i}][{d}], k);
//: else
          s[{i}][{y}] = add_dot(s[{i}][{y}], q[{i}][{d}], k);
//: end
//: end
        }
//: end
//: end
//: if PRODUCTS
//: for i < RM
        s[{i}] = vec4<f32>(sums[{i}]);
//: end
        let k_scale = vec4<f32>(b_scale[x], b_scale[x + 1u], b_scale[x + 2u], b_scale[x + 3u]);
//: end
        fold_rows(&s, lane);
        var alpha: array<f32, OWN>;
//: for o < OWN
        {
          let h = head_of(at, own + {o});
          let i = position_of(at, own + {o});
          var on = vec4<bool>(true);
          if (!whole) { on = visible_four(at, h, i, i32(j0 + x)); }
//: if PRODUCTS
          let q_k = of_alike(s[{o}]) * unit[{o}] * k_scale + vec4<f32>(moved[{o}]);
          let w = change_four(at, h, i, i32(j0 + x), q_k, on);
//: else
          let w = change_four(at, h, i, i32(j0 + x), of_alike(s[{o}]), on);
//: end
          // online_softmax
          let m_new = max(m_i[{o}], largest(apply_mask(w, on, LOWEST)));
          alpha[{o}] = share(m_i[{o}] - m_new);
          s[{o}] = apply_mask(exp2((w - vec4<f32>(m_new)) * LOG2E), on, HIDDEN);
          m_i[{o}] = m_new;
          l_i[{o}] = add_weights(l_i[{o}] * alpha[{o}], s[{o}]);
//: if DROPOUT
          s[{o}] = kept_weights(drop(at, h, i, i32(j0 + x), s[{o}]));
//: end
        }
//: end
        var p: array<vec4<f32>, RM>;
//: for i < RM
        {
          p[{i}] = from_owner(s[{i} % OWN], lane0, {i});
          let factor = number_from_owner(alpha[{i} % OWN], lane0, {i});
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
//: if SPLIT
//: else
    // merge
    var kept: array<f32, OWN>;
//: for o < OWN
    kept[{o}] = share(whole_m[{o}] - m_i[{o}]);
    whole_m[{o}] = m_i[{o}];
    whole_l[{o}] = whole_l[{o}] * kept[{o}] + l_i[{o}];
    l_i[{o}] = 0.0;
//: end
//: for i < RM
    {
      let factor = number_from_owner(kept[{i} % OWN], lane0, {i});
//: for c < WIDTH_V
      whole_acc[{i}][{c}] = whole_acc[{i}][{c}] * factor + acc[{i}][{c}];
      acc[{i}][{c}] = vec4<f32>(0.0);
//: end
    }
//: end
//: end
  }
//: if SPLIT
  var whole_acc = acc;
  var whole_l = l_i;
//: else
//: for o < OWN
  whole_l[{o}] += l_i[{o}];  // of a row without keys: its sink
//: end
//: end
//: for i < RM
  {
    var l = number_from_owner(whole_l[{i} % OWN], lane0, {i});  // spirv-cross would move a `let` into the branch
    if (first + {i} < count) {
//: for c < WIDTH_V
      finalize(at, first + {i}, lane + {c} * LANES, whole_acc[{i}][{c}], l);
//: end
    }
  }
//: end
//: for o < OWN
  if (lane % OWNERS == 0u && own + {o} < count) { finalize_row(at, own + {o}, m_i[{o}], whole_l[{o}]); }
//: end
}
