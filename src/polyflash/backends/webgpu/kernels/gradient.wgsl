// Weights and score gradients of four pairs, recomputed from lse:
//
//     p = exp(s - lse)     ds = p * (dp - delta), times 1 - tanh^2 if soft-capped; of a pair not seen 0

struct Pairs { p: vec4<f32>, ds: vec4<f32>, seen: f32 }  // as `packed`

// Which of four pairs are seen, as bits of a float that is a number.
fn packed(on: vec4<bool>) -> f32 {
  return dot(select(vec4<f32>(0.0), vec4<f32>(1.0, 2.0, 4.0, 8.0), on), vec4<f32>(1.0));
}

fn unpacked(x: f32) -> vec4<bool> {
  return (vec4<u32>(u32(x)) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u);
}

//: if SOFTCAP
fn cap_slope(dot_product: f32) -> f32 {
  let t = tanh_of(dot_product * n.scale / n.softcap);
  return 1.0 - t * t;
}
//: end

// ds of one pair that is seen, before the soft cap has its say.
fn bias_gradient(s: f32, dp: f32, lse: f32, delta: f32) -> f32 {
  let ds = exp2((s - lse) * LOG2E) * (dp - delta);
  return select(ds, 0.0, bitcast<u32>(lse) == bitcast<u32>(EMPTY));
}

fn differentiate(
  dot_product: vec4<f32>, s: vec4<f32>, dp: vec4<f32>, lse: vec4<f32>, delta: vec4<f32>, seen: vec4<bool>,
//: if DROPOUT
  kept: vec4<bool>,
//: end
) -> Pairs {
  var pairs: Pairs;
  // by its bits: a comparison of floats would take a NaN for a row without keys
  let on = seen & (bitcast<vec4<u32>>(lse) != vec4<u32>(bitcast<u32>(EMPTY)));
  pairs.p = apply_mask(exp2((s - lse) * LOG2E), on, 0.0);
  var slope = vec4<f32>(1.0);
//: if SOFTCAP
  slope = vec4<f32>(
    cap_slope(dot_product.x), cap_slope(dot_product.y), cap_slope(dot_product.z), cap_slope(dot_product.w));
//: end
  pairs.seen = packed(on);
//: if DROPOUT
  // dp, and the p that dv is made of, have lost what was dropped
  let kept_dp = select(vec4<f32>(0.0), dp * n.keep_scale, kept);
  pairs.ds = apply_mask(pairs.p * (kept_dp - delta) * slope, on, 0.0);
  pairs.p = select(vec4<f32>(0.0), pairs.p * n.keep_scale, kept);
//: else
  pairs.ds = apply_mask(pairs.p * (dp - delta) * slope, on, 0.0);
//: end
  return pairs;
}
