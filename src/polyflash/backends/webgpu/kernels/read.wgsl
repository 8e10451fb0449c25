// Four channels 4 * c .. 4 * c + 3 of key j's K, or V: what is stored, or what its codes stand for. Of those
// four of 8 bits are a word, or eight of 4 bits, the even channel in the low half of its byte.
//
//     value = decode(code) * scale + shift
//
// `ask` is all that leaves memory, `decode` all that is computed: what lies between them waits for nothing.

//: if {SIDE}_CODES
struct Asked_{side} {
  w: u32,
  scale: In_{side}_scale,
//: if {SIDE}_SHIFT
  shift: In_{side}_shift,
//: end
}

fn ask_{side}(at: Place, j: u32, c: u32) -> Asked_{side} {
  var x: Asked_{side};
//: if {SIDE}_FOUR_BITS
  x.w = {side}[key_of(at, j) * {SIDE}_WORDS + c / 2u];
//: else
  x.w = {side}[key_of(at, j) * {SIDE}_WORDS + c];
//: end
  x.scale = {side}_scale(at, j, c);
//: if {SIDE}_SHIFT
  x.shift = {side}_shift(at, j, c);
//: end
  return x;
}

fn decode_{side}(asked: Asked_{side}, c: u32) -> vec4<f32> {
//: if {SIDE}_FOUR_BITS
  let code = (vec4<u32>(asked.w >> (c % 2u * 16u)) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u);
//: else
  let code = (vec4<u32>(asked.w) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
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
  x *= asked.scale;
//: if {SIDE}_SHIFT
  x += asked.shift;
//: end
//: if {SIDE}_RAGGED
  x = select(vec4<f32>(0.0), x, vec4<u32>(4u * c) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>({SIDE}_DIM));
//: end
  return x;
}
//: else
struct Asked_{side} { w: In_{side} }

fn ask_{side}(at: Place, j: u32, c: u32) -> Asked_{side} {
  return Asked_{side}({side}[key_of(at, j) * {SIDE}_FOURS + c]);
}

fn decode_{side}(asked: Asked_{side}, c: u32) -> vec4<f32> { return widened_{side}(asked.w); }
//: end

fn read_{side}(at: Place, j: u32, c: u32) -> vec4<f32> { return decode_{side}(ask_{side}(at, j, c), c); }

//: if {SIDE}_TABLED
fn value_of_{side}(code: u32) -> f32 { return bitcast<f32>(words[n.{side}_values + code]); }
//: end
