// Keys and values of a block, for kernels in which every thread reads all of them. `fetch_tile` asks for all that
// a thread brings before it waits for any of it, and while others still read the block before; `store_tile`
// follows. There must be a key; those beyond the last are zeros.

//: if PRODUCTS
var<workgroup> b_k: array<u32, BN * D4>;  // codes, as they are
var<workgroup> b_scale: array<f32, BN>;
//: else
var<workgroup> b_k: array<vec4<f32>, BN * D4>;
//: end
var<workgroup> b_v: array<vec4<f32>, BN * DV4>;

//: if PRODUCTS
struct Fetched { k: array<u32, K_TURNS>, v: array<vec4<f32>, V_TURNS>, scale: f32 }
//: else
struct Fetched { k: array<vec4<f32>, K_TURNS>, v: array<vec4<f32>, V_TURNS> }
//: end

fn fetch_tile(at: Place, j0: u32, t: u32, part: ptr<function, Fetched>) {
//: for y < K_TURNS
  {
    let x = t + {y} * NT;
    let j = i32(j0 + x / D4);
//: if PRODUCTS
    (*part).k[{y}] = k[key_of(at, u32(min(j, at.kv_end - 1))) * K_WORDS + x % D4];
//: else
    let w = read_k(at, u32(min(j, at.kv_end - 1)), x % D4);
    (*part).k[{y}] = select(vec4<f32>(0.0), w, j < at.kv_end);
//: end
  }
//: end
//: if PRODUCTS
  (*part).scale = k_scale(at, u32(min(i32(j0 + t % BN), at.kv_end - 1)), 0u).x;
//: end
//: for y < V_TURNS
  {
    let x = t + {y} * NT;
    let j = i32(j0 + x / DV4);
    let w = read_v(at, u32(min(j, at.kv_end - 1)), x % DV4);
    (*part).v[{y}] = select(vec4<f32>(0.0), w, j < at.kv_end);
  }
//: end
}

fn store_tile(t: u32, part: ptr<function, Fetched>) {
//: if PRODUCTS
  if (t < BN) { b_scale[t] = (*part).scale; }
//: end
//: for y < K_TURNS
  if (K_TURNS * NT == BN * D4 || t + {y} * NT < BN * D4) { b_k[t + {y} * NT] = (*part).k[{y}]; }
//: end
//: for y < V_TURNS
  if (V_TURNS * NT == BN * DV4 || t + {y} * NT < BN * DV4) { b_v[t + {y} * NT] = (*part).v[{y}]; }
//: end
}
