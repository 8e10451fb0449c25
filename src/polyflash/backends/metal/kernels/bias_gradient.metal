// The gradient of a bias: p·(do vᵀ - delta), summed over whatever the bias is broadcast to.
//
// A threadgroup owns what no other sums: a tile of OWN rows and WALK keys of the bias, and walks the batch entries
// and heads that share it. Of a bias without rows (or keys) of its own it walks, for one entry and head, all tiles
// of its keys (or rows), and its sums of a tile are few enough to be summed once more. No atomics: bits repeat.

constant constexpr int THREADS = 4 * OWN;  // a simdgroup has 8 rows
constant constexpr int OWN_COLUMNS = WALK / 4;

kernel void differentiate_bias(OPERANDS, device const T* q [[buffer(14)]], device const T* k [[buffer(15)]],
                               device const T* v [[buffer(16)]], device const T* dout [[buffer(17)]],
                               device const float* row_lse [[buffer(18)]], device const float* delta [[buffer(19)]],
                               device float* sums [[buffer(20)]], uint3 i_group [[threadgroup_position_in_grid]],
                               ushort i_sg [[simdgroup_index_in_threadgroup]],
                               ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 rows_a_memory[OWN * (DIM + PAD) / 4];
  threadgroup float4 rows_b_memory[OWN * (DIM_V + PAD) / 4];
  threadgroup float4 keys_memory[WALK * (DIM + PAD) / 4];
  threadgroup float4 values_memory[WALK * (DIM_V + PAD) / 4];
  threadgroup float strips[OWN * (WALK + PAD)];
  threadgroup float* rows_a = (threadgroup float*)rows_a_memory;
  threadgroup float* rows_b = (threadgroup float*)rows_b_memory;
  threadgroup float* keys = (threadgroup float*)keys_memory;
  threadgroup float* values = (threadgroup float*)values_memory;
  threadgroup float* strip = strips + i_sg * 8 * (WALK + PAD);
  threadgroup float* own = strip + (lane >> 2) * (WALK + PAD) + (lane & 3);
  const int thread_index = i_sg * 32 + lane;

  const int kept_heads = n.num_heads / n.walked_heads, kept_b = i_group.z / kept_heads, kept_h = i_group.z % kept_heads;
  float sum[OWN_COLUMNS];
  UNROLL for (int c = 0; c < OWN_COLUMNS; ++c) sum[c] = 0.0f;
  for (int i_w = 0; i_w < n.walked_batch * n.walked_heads; ++i_w) {
    const int i_b = kept_b + i_w / n.walked_heads, i_h = kept_h + i_w % n.walked_heads, i_hkv = i_h / n.group;
    Call call = {OPERANDS_HERE, {}, {}, i_b, i_h};
    call.place = find_place(call.x, n, i_b);
    call.band = find_band(call.place, n);
    const Values b_q = values_of(q, n.q, i_b, i_h, n.head_dim, row_layout(call.place));
    const Values b_do = values_of(dout, n.dout, i_b, i_h, n.head_dim_v, row_layout(call.place));
    const Layout layout = key_layout(call.x, n, call.place, i_b);
    const Values b_k = values_of(k, n.k, i_b, i_hkv, n.head_dim, layout);
    const Values b_v = values_of(v, n.v, i_b, i_hkv, n.head_dim_v, layout);
    const long head_rows = (i_b * n.num_heads + i_h) * n.seqlen_q;
    const int i_m = i_group.y * OWN, j_n = i_group.x * WALK;
    const Blocks blocks = OVER_ROWS ? row_range<OWN>(j_n, j_n + WALK, call.place, call.band)
                                    : block_range<WALK>(i_m, i_m + OWN - 1, call.place, call.band);
    const int lo = OVER_ROWS || OVER_KEYS ? blocks.lo : max(blocks.lo, int(i_group.x));
    const int hi = OVER_ROWS || OVER_KEYS ? blocks.hi : min(blocks.hi, int(i_group.x) + 1);
    for (int i_x = lo; i_x < hi; ++i_x) {
      const int first = OVER_ROWS ? i_x * OWN : i_m, j_0 = OVER_ROWS ? j_n : i_x * WALK;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      load_tile<OWN, DIM, THREADS, false>(rows_a, b_q, first, call.place.rows, thread_index);
      load_tile<OWN, DIM_V, THREADS, false>(rows_b, b_do, first, call.place.rows, thread_index);
      load_tile<WALK, DIM, THREADS, false>(keys, b_k, j_0, call.place.live, thread_index);
      load_tile<WALK, DIM_V, THREADS, false>(values, b_v, j_0, call.place.live, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const int i = first + i_sg * 8 + (lane >> 2);
      multiply_turned<DIM, WALK>(strip, rows_a + i_sg * 8 * (DIM + PAD), keys);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      float b_p[OWN_COLUMNS];
      uint seen = 0;  // a bit per column: a weight may be NaN
      UNROLL for (int c = 0; c < OWN_COLUMNS; ++c) {
        const int j = j_0 + 4 * c + (lane & 3);
        float cap = 0.0f;
        b_p[c] = 0.0f;
        if (visible(i, j, call, n) && row_lse[head_rows + i] != -minus_infinity()) {
          b_p[c] = weight_again(own[4 * c], row_lse[head_rows + i], i, j, call, n, f, cap);
          seen |= 1u << c;
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      multiply_turned<DIM_V, WALK>(strip, rows_b + i_sg * 8 * (DIM_V + PAD), values);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int c = 0; c < OWN_COLUMNS; ++c)
        if ((seen >> c & 1u) != 0) {
          const float dp = dropped(own[4 * c], i, j_0 + 4 * c + (lane & 3), call, n, f);
          sum[c] += b_p[c] * (dp - delta[head_rows + i]);
        }
    }
  }
  const int row = i_sg * 8 + (lane >> 2) + (OVER_ROWS ? 0 : i_group.y * OWN);
  UNROLL for (int c = 0; c < OWN_COLUMNS; ++c) {
    const int key = 4 * c + (lane & 3) + (OVER_KEYS ? 0 : i_group.x * WALK);
    if (row < (OVER_ROWS ? OWN : n.seqlen_q) && key < (OVER_KEYS ? WALK : n.seqlen_k))
      sums[kept_b * n.grad.b + kept_h * n.grad.h + row * n.grad.s + key] = sum[c];
  }
}
