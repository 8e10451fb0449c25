// delta = Σ_d do·out - dlse, one value per row, and the lse as gradients need it.

// One simdgroup per row: delta, and the lse with +inf for rows that saw nothing, whose weights are then 0.
kernel void center(OPERANDS, device const T* out [[buffer(14)]], device const T* dout [[buffer(15)]],
                   device const float* lse [[buffer(16)]], device const float* dlse [[buffer(17)]],
                   device float* row_lse [[buffer(18)]], device float* delta [[buffer(19)]],
                   uint3 i_group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  const int i = i_group.x, i_h = i_group.y, i_b = i_group.z;
  device const T* a = out + i_b * n.out.b + i_h * n.out.h + i * n.out.s;
  device const T* b = dout + i_b * n.dout.b + i_h * n.dout.h + i * n.dout.s;
  float sum = 0.0f;
  for (int c = lane; c < n.head_dim_v; c += 32) sum += float(a[c]) * float(b[c]);
  sum = simd_sum(sum);
  const float saved = lse[i_b * n.lse.b + i_h * n.lse.h + i * n.lse.s];
  if (HAS_DLSE) sum -= dlse[i_b * n.dlse.b + i_h * n.dlse.h + i * n.dlse.s];
  const bool empty = saved == minus_infinity();
  const long row = (i_b * n.num_heads + i_h) * n.seqlen_q + i;
  if (lane == 0) row_lse[row] = empty ? -minus_infinity() : saved;
  if (lane == 0) delta[row] = empty ? 0.0f : sum;
}
