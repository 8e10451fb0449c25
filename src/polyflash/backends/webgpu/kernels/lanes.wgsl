// Kernels that keep rows (or keys) in registers: LANES threads share RM of them, and each has the channels
// 4 * (lane + c * LANES) .. + 3. What is read once from workgroup memory then serves RM rows.
//
// Scores of four keys are sums over the lanes. With each `fold` a lane gives half of its rows away and adds what
// it gets to the others, until it has OWN rows alone, or together with lanes that are `ALIKE`: nothing of the
// softmax is done twice. What a row's owner found comes back by `from_owner`.

//: if SUBGROUPS
fn fold(lower: vec4<f32>, upper: vec4<f32>, lane: u32, far: u32) -> vec4<f32> {
  let is_upper = (lane & far) != 0u;
  return select(lower, upper, is_upper) + subgroupShuffleXor(select(upper, lower, is_upper), far);
}

fn fold_rows(s: ptr<function, array<vec4<f32>, RM>>, lane: u32) {
//: for i < HALF1
  (*s)[{i}] = fold((*s)[{i}], (*s)[{i} + HALF1], lane, FAR1);
//: end
//: for i < HALF2
  (*s)[{i}] = fold((*s)[{i}], (*s)[{i} + HALF2], lane, FAR2);
//: end
//: for i < HALF3
  (*s)[{i}] = fold((*s)[{i}], (*s)[{i} + HALF3], lane, FAR3);
//: end
}

fn of_alike(x: vec4<f32>) -> vec4<f32> {
  var sum = x;
  for (var far = ALIKE; far > 0u; far /= 2u) { sum += subgroupShuffleXor(sum, far); }
  return sum;
}

// Row i is the owner's i % OWN.
fn from_owner(x: vec4<f32>, lane0: u32, i: u32) -> vec4<f32> { return subgroupShuffle(x, lane0 + i * LANES / RM); }
fn number_from_owner(x: f32, lane0: u32, i: u32) -> f32 { return subgroupShuffle(x, lane0 + i * LANES / RM); }
//: else
fn fold_rows(s: ptr<function, array<vec4<f32>, RM>>, lane: u32) {}
fn of_alike(x: vec4<f32>) -> vec4<f32> { return x; }
fn from_owner(x: vec4<f32>, lane0: u32, i: u32) -> vec4<f32> { return x; }
fn number_from_owner(x: f32, lane0: u32, i: u32) -> f32 { return x; }
//: end
