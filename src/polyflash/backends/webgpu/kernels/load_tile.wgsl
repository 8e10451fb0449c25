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

struct Fetched { k: array<Asked_k, K_TURNS>, v: array<Asked_v, V_TURNS>, count: u32 }

fn fetch_tile(at: Place, j0: u32, t: u32, part: ptr<function, Fetched>) {
  (*part).count = u32(at.kv_end) - j0;
//: for y < K_TURNS
  (*part).k[{y}] = ask_k(at, u32(min(i32(j0 + (t + {y} * NT) / D4), at.kv_end - 1)), (t + {y} * NT) % D4);
//: end
//: for y < V_TURNS
  (*part).v[{y}] = ask_v(at, u32(min(i32(j0 + (t + {y} * NT) / DV4), at.kv_end - 1)), (t + {y} * NT) % DV4);
//: end
}

fn store_tile(t: u32, part: ptr<function, Fetched>) {
//: for y < K_TURNS
  {
    let x = t + {y} * NT;
    if (K_TURNS * NT == BN * D4 || x < BN * D4) {
//: if PRODUCTS
      b_k[x] = (*part).k[{y}].w;
      if (x % D4 == 0u) { b_scale[x / D4] = (*part).k[{y}].scale; }
//: else
      b_k[x] = select(vec4<f32>(0.0), decode_k((*part).k[{y}], x % D4), x / D4 < (*part).count);
//: end
    }
  }
//: end
//: for y < V_TURNS
  {
    let x = t + {y} * NT;
    if (V_TURNS * NT == BN * DV4 || x < BN * DV4) {
      b_v[x] = select(vec4<f32>(0.0), decode_v((*part).v[{y}], x % DV4), x / DV4 < (*part).count);
    }
  }
//: end
}
