// Keys and values of a block, for kernels in which every thread reads all of them.

var<workgroup> b_k: array<vec4<f32>, BN * D4>;
var<workgroup> b_v: array<vec4<f32>, BN * DV4>;

fn load_tile(at: Place, j0: u32, t: u32) {
  for (var x = t; x < BN * D4; x += NT) {
    let j = j0 + x / D4;
    var w = vec4<f32>(0.0);
    if (i32(j) < at.kv_end) { w = read_k(at, j, x % D4); }
    b_k[x] = w;
  }
  for (var x = t; x < BN * DV4; x += NT) {
    let j = j0 + x / DV4;
    var w = vec4<f32>(0.0);
    if (i32(j) < at.kv_end) { w = read_v(at, j, x % DV4); }
    b_v[x] = w;
  }
}
