// Attention gradients: weights recomputed from lse, dK and dV by one launch, dQ by another, without atomics.
//
//   delta = Σ_d do·out - dlse                               `center`, in center.metal
//
//   dK and dV: a threadgroup owns OWN keys                  dQ: a threadgroup owns OWN rows
//   for m in row_range(i_n), of each head of the group:     for n in block_range(i_m):
//     pᵀ = exp(kqᵀ - lse)          [OWN, WALK]                p = exp(qkᵀ - lse)         [OWN, WALK]
//     dsᵀ = pᵀ·(v doᵀ - delta)                                ds = p·(do vᵀ - delta)
//     dv += pᵀ @ do                [OWN, DIM_V]
//     dk += dsᵀ @ q                [OWN, DIM]                 dq += ds @ k               [OWN, DIM]
//   dk·scale                                                dq·scale
//
// Both are `differentiate`: what a threadgroup owns is (k, v) or (q, do), what it walks over is the other. ds
// is multiplied by 1 - tanh² under a softcap; with dropout dP, and the P of dv, lose what it drops. Every sum has a
// fixed order: bits repeat.

constant constexpr int THREADS = 4 * OWN;  // a simdgroup has 8 rows or keys of what is owned
constant constexpr int OWN_COLUMNS = WALK / 4;

// What the NaN and infinities of dO add to the dV of a key that their rows see, of all heads of its group.
struct NonFiniteRows {
  bool any;
  device const T* dout;  // of the request's first row and first head of the group
  int j, first_head, heads;
  thread const Call* call;
  constant Numbers* n;

  float at(int channel) const {
    float sum = 0.0f;
    Call other = *call;
    for (int h = 0; any && h < heads; ++h) {
      other.i_h = first_head + h;
      for (int i = 0; i < other.place.rows; ++i) {
        const float x = float(dout[h * n->dout.h + i * n->dout.s + channel]);
        if (is_odd(x) && visible(i, j, other, *n)) sum += x;
      }
    }
    return sum;
  }
};

kernel void differentiate(OPERANDS, device const T* q [[buffer(14)]], device const T* k [[buffer(15)]],
                          device const T* v [[buffer(16)]], device const T* dout [[buffer(17)]],
                          device const float* row_lse [[buffer(18)]], device const float* delta [[buffer(19)]],
                          device T* grad [[buffer(20)]], device T* dv [[buffer(21)]],
                          uint3 i_group [[threadgroup_position_in_grid]],
                          ushort i_sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 own_a_memory[OWN * (DIM + PAD) / 4];
  threadgroup float4 own_b_memory[OWN * (DIM_V + PAD) / 4];
  threadgroup float4 walked_a_memory[WALK * (DIM + PAD) / 4];
  threadgroup float4 walked_b_memory[WALK * (DIM_V + PAD) / 4];
  threadgroup float strips[OWN * (WALK + PAD)];
  threadgroup int flags[OWN / 8];
  threadgroup float* own_a = (threadgroup float*)own_a_memory;
  threadgroup float* own_b = (threadgroup float*)own_b_memory;
  threadgroup float* walked_a = (threadgroup float*)walked_a_memory;
  threadgroup float* walked_b = (threadgroup float*)walked_b_memory;
  threadgroup float* strip = strips + i_sg * 8 * (WALK + PAD);
  threadgroup float* own = strip + (lane >> 2) * (WALK + PAD) + (lane & 3);
  const int thread_index = i_sg * 32 + lane;

  int i_b = i_group.z, i_tile = i_group.x;
  if (VARLEN && OWNS_KEYS) i_b = find_member<OWN>(cu_seqlens_k, n.batch, n.seqlen_k, 1, i_tile);
  if (VARLEN && !OWNS_KEYS) i_b = find_member<OWN>(cu_seqlens_q, n.batch, n.seqlen_q, 1, i_tile);
  const int first = i_tile * OWN, mine = first + i_sg * 8 + (lane >> 2);
  const int i_hkv = OWNS_KEYS ? i_group.y : i_group.y / n.group;
  const int first_head = OWNS_KEYS ? i_group.y * n.group : i_group.y, heads = OWNS_KEYS ? n.group : 1;
  Call call = {OPERANDS_HERE, {}, {}, i_b, first_head};
  call.place = find_place(call.x, n, i_b);
  call.band = find_band(call.place, n);
  const Blocks blocks = OWNS_KEYS ? row_range<WALK>(first, first + OWN, call.place, call.band)
                                  : block_range<WALK>(first, first + OWN - 1, call.place, call.band);
  const int i_entry = call.place.i_b, rows = call.place.rows, live = call.place.live;
  const Layout keys = key_layout(call.x, n, call.place, i_b);
  const Values b_k = values_of(k, n.k, i_entry, i_hkv, n.head_dim, keys);
  const Values b_v = values_of(v, n.v, i_entry, i_hkv, n.head_dim_v, keys);
  Values b_q = values_of(q, n.q, i_entry, first_head, n.head_dim, row_layout(call.place));
  Values b_do = values_of(dout, n.dout, i_entry, first_head, n.head_dim_v, row_layout(call.place));
  if (OWNS_KEYS) {
    load_tile<OWN, DIM, THREADS, false>(own_a, b_k, first, live, thread_index);
    load_tile<OWN, DIM_V, THREADS, false>(own_b, b_v, first, live, thread_index);
  } else {
    load_tile<OWN, DIM, THREADS, false>(own_a, b_q, first, rows, thread_index);
    load_tile<OWN, DIM_V, THREADS, false>(own_b, b_do, first, rows, thread_index);
  }
  simdgroup_float8x8 acc_a[DIM / 8], acc_v[DIM_V / 8];
  UNROLL for (int d = 0; d < DIM / 8; ++d) acc_a[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  UNROLL for (int d = 0; d < DIM_V / 8; ++d) acc_v[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  const simdgroup_float8x8 one = simdgroup_float8x8(1.0f);
  bool ever_odd = false;

  for (int i_w = blocks.lo; i_w < blocks.lo + (blocks.hi - blocks.lo) * heads; ++i_w) {
    const int h = (i_w - blocks.lo) / (blocks.hi - blocks.lo), i_block = i_w - h * (blocks.hi - blocks.lo);
    const int at = i_block * WALK;
    const bool full = i_block >= blocks.full_lo && i_block < blocks.full_hi && !CHANGED && !HIDES;
    call.i_h = first_head + h;
    bool odd;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (OWNS_KEYS) {
      b_q = values_of(q, n.q, i_entry, call.i_h, n.head_dim, row_layout(call.place));
      b_do = values_of(dout, n.dout, i_entry, call.i_h, n.head_dim_v, row_layout(call.place));
      odd = load_tile<WALK, DIM, THREADS, false>(walked_a, b_q, at, rows, thread_index);
      odd |= load_tile<WALK, DIM_V, THREADS, false>(walked_b, b_do, at, rows, thread_index);
    } else {
      odd = load_tile<WALK, DIM, THREADS, false>(walked_a, b_k, at, live, thread_index);
      load_tile<WALK, DIM_V, THREADS, false>(walked_b, b_v, at, live, thread_index);
    }
    odd = simd_any(odd);
    if (lane == 0) flags[i_sg] = odd;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int s = 0; s < OWN / 8; ++s) odd = odd || flags[s] != 0;

    multiply_turned<DIM, WALK>(strip, own_a + i_sg * 8 * (DIM + PAD), walked_a);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const long head_rows = (i_entry * n.num_heads + call.i_h) * n.seqlen_q + call.place.first_q;
    float b_p[OWN_COLUMNS], b_slope[OWN_COLUMNS];
    uint seen = 0;  // a bit per column: a weight may be NaN
    UNROLL for (int c = 0; c < OWN_COLUMNS; ++c) {
      const int other = at + 4 * c + (lane & 3), i = OWNS_KEYS ? other : mine, j = OWNS_KEYS ? mine : other;
      const bool sees = i < rows && (full || visible(i, j, call, n));
      float cap = 0.0f;
      b_p[c] = 0.0f;
      if (sees) {
        b_p[c] = weight_again(own[4 * c], row_lse[head_rows + i], i, j, call, n, f, cap);
        seen |= 1u << c;
      }
      b_slope[c] = 1.0f - cap * cap;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    multiply_turned<DIM_V, WALK>(strip, own_b + i_sg * 8 * (DIM_V + PAD), walked_b);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float b_ds[OWN_COLUMNS];
    UNROLL for (int c = 0; c < OWN_COLUMNS; ++c) {
      const int other = at + 4 * c + (lane & 3), i = OWNS_KEYS ? other : mine, j = OWNS_KEYS ? mine : other;
      const bool sees = (seen >> c & 1u) != 0;
      const float dp = dropped(own[4 * c], i, j, call, n, f);
      b_ds[c] = sees ? b_p[c] * (dp - delta[head_rows + i]) * b_slope[c] : 0.0f;
      if (sees && row_lse[head_rows + i] == -minus_infinity()) b_ds[c] = 0.0f;
      own[4 * c] = OWNS_KEYS ? dropped(b_p[c], i, j, call, n, f) : b_ds[c];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (odd) {  // a weight of 0 times what is not finite: products take 0 for both
      ever_odd = true;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      clean_tile<WALK, DIM, THREADS>(walked_a, thread_index);
      if (OWNS_KEYS) clean_tile<WALK, DIM_V, THREADS>(walked_b, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (OWNS_KEYS) {
      multiply_add<DIM_V, WALK>(acc_v, strip, walked_b, 0, WALK, false, one);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int c = 0; c < OWN_COLUMNS; ++c) own[4 * c] = b_ds[c];
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    multiply_add<DIM, WALK>(acc_a, strip, walked_a, 0, WALK, false, one);
  }

  const bool there = mine < (OWNS_KEYS ? call.place.keys : rows);
  const long position = mine + (OWNS_KEYS ? call.place.first_k : call.place.first_q);
  device T* to = grad + i_entry * n.grad.b + i_group.y * n.grad.h + position * n.grad.s;
  const Nothing nothing;
  store_tile<DIM, WALK>(to, acc_a, f.scale, 1.0f, there, n.head_dim, nothing, strip, lane);
  if (OWNS_KEYS) {
    device const T* do_head = dout + i_entry * n.dout.b + first_head * n.dout.h + call.place.first_q * n.dout.s;
    const NonFiniteRows extra = {ever_odd, do_head, mine, first_head, heads, &call, &n};
    device T* to_v = dv + i_entry * n.dv.b + i_group.y * n.dv.h + position * n.dv.s;
    store_tile<DIM_V, WALK>(to_v, acc_v, 1.0f, 1.0f, there, n.head_dim_v, extra, strip, lane);
  }
}
