// Four channels 4 * c .. 4 * c + 3 of key j's K, or V: what is stored, or what its codes stand for. Of those
// four of 8 bits are a word, or eight of 4 bits, the even channel in the low half of its byte.
//
//     value = decode(code) * scale + shift

fn read_{side}(at: Place, j: u32, c: u32) -> vec4<f32> {
//: if {SIDE}_CODES
//: if {SIDE}_FOUR_BITS
  let w = {side}[key_of(at, j) * {SIDE}_WORDS + c / 2u] >> (c % 2u * 16u);
  let code = (vec4<u32>(w) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u);
//: else
  let w = {side}[key_of(at, j) * {SIDE}_WORDS + c];
  let code = (vec4<u32>(w) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
//: end
//: if {SIDE}_MIDDLE
  // integers: those of 8 bits in two's complement, of 4 bits from 0 to 15
//: if {SIDE}_FOUR_BITS
  var x = vec4<f32>(code) - f32({SIDE}_MIDDLE);
//: else
  var x = vec4<f32>(code ^ vec4<u32>({SIDE}_MIDDLE)) - f32({SIDE}_MIDDLE);
//: end
//: else
  var x = vec4<f32>(value_of_{side}(code.x), value_of_{side}(code.y), value_of_{side}(code.z),
    value_of_{side}(code.w));
//: end
  x *= {side}_scale(at, j, c);
//: if {SIDE}_SHIFT
  x += {side}_shift(at, j, c);
//: end
//: if {SIDE}_RAGGED
  x = select(vec4<f32>(0.0), x, vec4<u32>(4u * c) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>({SIDE}_DIM));
//: end
  return x;
//: else
  return load_{side}(key_of(at, j) * {SIDE}_FOURS + c);
//: end
}

//: if {SIDE}_TABLED
fn value_of_{side}(code: u32) -> f32 { return bitcast<f32>(words[n.{side}_values + code]); }
//: end
