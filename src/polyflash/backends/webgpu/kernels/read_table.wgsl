// The scales, or the shifts, of four channels of key j: one for each block of TOKENS by CHANNELS, 0 is all.

//: if {SIDE}_{TABLE}
//: if {SIDE}_{TABLE}_SHARED
alias In_{side}_{table} = f32;
//: else
alias In_{side}_{table} = vec4<f32>;
//: end

fn {side}_{table}(at: Place, j: u32, c: u32) -> In_{side}_{table} {
//: if PAGE
  var block = page_of(at, j);
//: else
  var block = at.k_base / n.k_rows + at.hk;
//: end
//: if {SIDE}_{TABLE}_TOKENS
  let blocks = (n.k_rows + {SIDE}_{TABLE}_TOKENS - 1u) / {SIDE}_{TABLE}_TOKENS;
//: if PAGE
  block = block * blocks + j % PAGE / {SIDE}_{TABLE}_TOKENS;
//: else
  block = block * blocks + (at.k_base % n.k_rows + j) / {SIDE}_{TABLE}_TOKENS;
//: end
//: end
  let first = n.{side}_{table} + block * {SIDE}_{TABLE}_WIDTH;
//: if {SIDE}_{TABLE}_SHARED
//: if {SIDE}_{TABLE}_CHANNELS
  return {side}_tables[first + 4u * c / {SIDE}_{TABLE}_CHANNELS];
//: else
  return {side}_tables[first];
//: end
//: else
  let own = (vec4<u32>(4u * c) + vec4<u32>(0u, 1u, 2u, 3u)) / {SIDE}_{TABLE}_CHANNELS;
  let x = vec4<u32>(first) + min(own, vec4<u32>({SIDE}_{TABLE}_WIDTH - 1u));
  return vec4<f32>({side}_tables[x.x], {side}_tables[x.y], {side}_tables[x.z], {side}_tables[x.w]);
//: end
}
//: end
