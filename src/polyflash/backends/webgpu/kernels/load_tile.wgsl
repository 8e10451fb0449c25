// Keys and values of a block, for kernels in which every thread reads all of them. `fetch_tile` asks for all
// that a thread brings before it waits for any of it, so that a kernel may ask early; `store_tile` follows.

var<workgroup> b_k: array<vec4<f32>, BN * D4>;
var<workgroup> b_v: array<vec4<f32>, BN * DV4>;

struct Fetched { k: array<vec4<f32>, K_TURNS>, v: array<vec4<f32>, V_TURNS> }

fn fetch_tile(at: Place, j0: u32, t: u32, part: ptr<function, Fetched>) {
//: for y < K_TURNS
  {
    let x = t + {y} * NT;
    let j = j0 + x / D4;
    (*part).k[{y}] = vec4<f32>(0.0);
    if (i32(j) < at.kv_end) { (*part).k[{y}] = load_k(key_of(at, j) * D4 + x % D4); }
  }
//: end
//: for y < V_TURNS
  {
    let x = t + {y} * NT;
    let j = j0 + x / DV4;
    (*part).v[{y}] = vec4<f32>(0.0);
    if (i32(j) < at.kv_end) { (*part).v[{y}] = load_v(key_of(at, j) * DV4 + x % DV4); }
  }
//: end
}

fn store_tile(t: u32, part: ptr<function, Fetched>) {
//: for y < K_TURNS
  if (t + {y} * NT < BN * D4) { b_k[t + {y} * NT] = (*part).k[{y}]; }
//: end
//: for y < V_TURNS
  if (t + {y} * NT < BN * DV4) { b_v[t + {y} * NT] = (*part).v[{y}]; }
//: end
}
