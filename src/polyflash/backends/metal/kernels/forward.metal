// Attention forward: the online softmax of BLOCK_M rows over blocks of BLOCK_N keys.
//
//   for n in block_range(i_m):
//     b_s = load_tile(q) @ load_tile(k)ᵀ                    [BLOCK_M, BLOCK_N]
//     b_s = apply_mask(b_s)                                 scores changed first, if they are
//     b_p, m_i, l_i, acc = online_softmax(b_s, m_i, l_i, acc)
//     acc += b_p @ load_tile(v)                             [BLOCK_M, DIM_V]
//   finalize(acc, m_i, l_i) -> out, lse
//
// Packed row r is row r / pack of head r % pack of its kv head, or with pack = 1 of the query head itself. With
// SPLIT, a threadgroup has keys [i_s·split_keys, ...) and hands over m and l: see merge.metal.

constant constexpr int THREADS = 4 * BLOCK_M;  // a simdgroup has 8 rows
constant constexpr int OWN_COLUMNS = BLOCK_N / 4;

// exp(scale·s - m) of scores in units of `factor`; the largest is exactly 1.
static float weight(float s, float m, float factor) {
  return BASE2 ? exp2((s - m) * factor) : exp((s - m) * factor);
}

// The new maximum, and l under it. Returns what older sums are multiplied by.
static float online_softmax(float top, thread float& m_i, thread float& l_i, float factor) {
  const float m_new = max(m_i, top), alpha = weight(m_i, m_new, factor);
  m_i = m_new;
  l_i *= alpha;
  return alpha;
}

typedef Stored<K_BITS, K_TOKENS, K_CHANNELS, K_SHIFT_TOKENS, K_SHIFT_CHANNELS> KRows;
typedef Stored<V_BITS, V_TOKENS, V_CHANNELS, V_SHIFT_TOKENS, V_SHIFT_CHANNELS> VRows;

// Head i_h of k or v, and of its tables.
template <typename Rows>
Rows rows_of_head(int size, device const uchar* x, View stride, device const float* scales, View scale,
                  device const float* shifts, View shift, int i_b, int i_h, int dim, Layout layout) {
  return {x + (i_b * stride.b + i_h * stride.h) * size, stride, dim, layout,
          scales + i_b * scale.b + i_h * scale.h, scale, shifts + i_b * shift.b + i_h * shift.h, shift};
}

kernel void attend(OPERANDS, device const T* q [[buffer(14)]], device const uchar* k [[buffer(15)]],
                   device const uchar* v [[buffer(16)]], device OUT* out [[buffer(17)]], device float* lse [[buffer(18)]],
                   device const float* k_scale [[buffer(19)]], device const float* k_shift [[buffer(20)]],
                   device const float* v_scale [[buffer(21)]], device const float* v_shift [[buffer(22)]],
                   uint3 i_group [[threadgroup_position_in_grid]], ushort i_sg [[simdgroup_index_in_threadgroup]],
                   ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 keys_memory[STAGES * BLOCK_N * (DIM + PAD) / 4];
  threadgroup float4 values_memory[STAGES * BLOCK_N * (DIM_V + PAD) / 4];
  threadgroup float strips[BLOCK_M * (BLOCK_N + PAD)];
  threadgroup int flags[BLOCK_M / 8];
  threadgroup float* keys = (threadgroup float*)keys_memory;
  threadgroup float* values = (threadgroup float*)values_memory;
  threadgroup float* strip = strips + i_sg * 8 * (BLOCK_N + PAD);
  threadgroup float* own = strip + (lane >> 2) * (BLOCK_N + PAD) + (lane & 3);
  const int thread_index = i_sg * 32 + lane;

  // This lane's row, and where its tile stands.
  int i_b = VARLEN ? 0 : i_group.z % n.batch, i_tile = i_group.x;
  const int i_s = VARLEN ? 0 : i_group.z / n.batch;
  if (VARLEN) i_b = find_member<BLOCK_M>(cu_seqlens_q, n.batch, n.seqlen_q, n.pack, i_tile);
  const int first_row = i_tile * BLOCK_M, r = first_row + i_sg * 8 + (lane >> 2);
  const int i = r / n.pack, i_h = i_group.y * n.pack + r % n.pack, i_hkv = i_group.y * n.pack / n.group;
  Call call = {OPERANDS_HERE, {}, {}, i_b, i_h};
  call.place = find_place(call.x, n, i_b);
  call.band = find_band(call.place, n);
  const bool there = i < call.place.rows;
  Blocks blocks = block_range<BLOCK_N>(first_row / n.pack, (first_row + BLOCK_M - 1) / n.pack, call.place, call.band);
  if (SPLIT) {
    blocks.lo = max(blocks.lo, int(i_s * n.split_keys / BLOCK_N));
    blocks.hi = min(blocks.hi, int((i_s + 1) * n.split_keys / BLOCK_N));
  }
  const int i_entry = PAGED ? 0 : call.place.i_b;  // of a pool the pages are the batch
  const Layout layout = key_layout(call.x, n, call.place, i_b);
  const KRows b_k = rows_of_head<KRows>(K_BITS ? 1 : sizeof(T), k, n.k, k_scale, n.k_scale, k_shift, n.k_shift, i_entry,
                                      i_hkv, n.head_dim, layout);
  const VRows b_v = rows_of_head<VRows>(V_BITS ? 1 : sizeof(T), v, n.v, v_scale, n.v_scale, v_shift,
                                                        n.v_shift, i_entry, i_hkv, n.head_dim_v, layout);

  // The rows of q as matrices, by way of the strip.
  simdgroup_float8x8 b_q[DIM / 8];
  device const T* q_row = q + call.place.i_b * n.q.b + i_h * n.q.h + (call.place.first_q + i) * n.q.s;
  UNROLL for (int c = 0; c < DIM; c += BLOCK_N) {
    for (int e = lane & 3; e < BLOCK_N; e += 4)
      strip[(lane >> 2) * (BLOCK_N + PAD) + e] = there && c + e < n.head_dim ? float(q_row[c + e]) : 0.0f;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int d = 0; d < BLOCK_N / 8; ++d)
      if (c + 8 * d < DIM) simdgroup_load(b_q[c / 8 + d], strip + 8 * d, BLOCK_N + PAD);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  simdgroup_float8x8 acc[DIM_V / 8];
  UNROLL for (int d = 0; d < DIM_V / 8; ++d) acc[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  const simdgroup_float8x8 one = simdgroup_float8x8(1.0f);
  float m_i = LOWEST, l_i = 0.0f, l_lost = 0.0f;  // of l, this lane's columns, and what float32 lost of them
  bool odd = false;

  for (int i_n = STAGES > 1 ? blocks.lo - 1 : blocks.lo; i_n < blocks.hi; ++i_n) {
    // With two stages the next block is read while this one is used; block lo - 1 has nothing to use.
    const int next = STAGES > 1 ? i_n + 1 : i_n, at = next & (STAGES - 1);
    if (STAGES == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (next < blocks.hi) {
      threadgroup float* k_tile = keys + at * BLOCK_N * (DIM + PAD);
      threadgroup float* v_tile = values + at * BLOCK_N * (DIM_V + PAD);
      const int j = next * BLOCK_N, end = call.place.live;
      load_tile<BLOCK_N, DIM, THREADS, false>(k_tile, b_k, j, end, thread_index);
      odd |= load_tile<BLOCK_N, DIM_V, THREADS, true>(v_tile, b_v, j, end, thread_index);
    }
    if (STAGES == 1 || i_n < blocks.lo) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i_n < blocks.lo) continue;
    const int j_0 = i_n * BLOCK_N, slot = i_n & (STAGES - 1);
    const bool full = i_n >= blocks.full_lo && i_n < blocks.full_hi;

    multiply_turned<DIM, BLOCK_N>(strip, b_q, keys + slot * BLOCK_N * (DIM + PAD));
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float b_s[OWN_COLUMNS], top = LOWEST;
    UNROLL for (int c = 0; c < OWN_COLUMNS; ++c) {
      b_s[c] = apply_mask(own[4 * c], i, j_0 + 4 * c + (lane & 3), full, call, n, f);
      top = max(top, b_s[c]);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // One maximum of the whole block, however many parts its exponential has.
    const float alpha = online_softmax(row_max(top), m_i, l_i, f.factor);
    l_lost *= alpha;
    if (simd_any(alpha != 1.0f)) rescale<DIM_V, BLOCK_N>(acc, alpha, strip, lane);
    float sum = l_lost;
    UNROLL for (int part = 0; part < SPLIT_EXP; ++part) {
      constexpr int size = BLOCK_N / SPLIT_EXP;
      UNROLL for (int c = part * size / 4; c < (part + 1) * size / 4; ++c) {
        const float p = weight(b_s[c], m_i, f.factor);
        sum += p;
        const float kept = dropped(p, i, j_0 + 4 * c + (lane & 3), call, n, f);
        own[4 * c] = EXACT && is_odd(p) ? 0.0f : kept;  // l has the NaN, and a product with `one` would spread it
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      multiply_add<DIM_V, BLOCK_N>(acc, strip, values + slot * BLOCK_N * (DIM_V + PAD), part * size,
                                          (part + 1) * size, EXACT, one);
    }
    const float l_new = l_i + sum;
    const float added = l_new - l_i;
    l_lost = EXACT ? l_i - (l_new - added) + (sum - added) : 0.0f;  // exact, whichever is larger
    l_i = l_new;
    if (STAGES > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // finalize: a sink is in the denominator alone, and whoever saw nothing is exactly 0 and -inf.
  odd = simd_any(odd);
  if (lane == 0) flags[i_sg] = odd;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int s = 0; s < BLOCK_M / 8; ++s) odd = odd || flags[s] != 0;
  l_i = row_sum(l_i);
  float m_out = l_i == 0.0f ? minus_infinity() : m_i * (SPLIT ? 1.0f : f.unit), older = 1.0f;
  if (HAS_SINKS && !SPLIT && i_b < n.batch) join_sink(call.x.sinks[i_h], m_out, l_i, older);
  const float divisor = l_i == 0.0f ? 1.0f : l_i;
  const NonFinite<VRows> extra = {odd && l_i != 0.0f, &b_v, i, blocks.lo * BLOCK_N,
                                          min(blocks.hi * BLOCK_N, call.place.live), &call, &n};
  const long i_out = i_s * n.batch + call.place.i_b, row = call.place.first_q + i;
  store_tile<DIM_V, BLOCK_N>(out + i_out * n.out.b + i_h * n.out.h + row * n.out.s, acc, older, divisor, there,
                             n.head_dim_v, extra, strip, lane);
  if (NEED_LSE && there && (lane & 3) == 0) {
    device float* to = lse + i_out * n.lse.b + i_h * n.lse.h + row * n.lse.s;
    *to = SPLIT ? m_out : l_i == 0.0f ? minus_infinity() : m_out + log(divisor);
    if (SPLIT) to[n.num_splits * n.batch * n.lse.b] = l_i;
  }
}
