// The splits of a call whose keys were cut up, as one; a simdgroup per row.
//
//   m = max_s m_s      l = Σ_s exp(scale·(m_s - m))·l_s      out = Σ_s exp(scale·(m_s - m))·l_s·out_s / l
//
// A split hands over m and l and not its lse, whose rounding is that of the scores.

// What sums count for: not 0, as 0 times an infinity among them would be NaN.
static float kept(float share) { return share < 0x1p-126f ? 0x1p-126f : share; }

static float weight(float m, float top, float l, float unit) {
  return l == 0.0f ? 0.0f : kept(exp2((m - top) * unit * LOG2E)) * l;
}

kernel void merge(OPERANDS, device const float* parts [[buffer(14)]], device const float* part_m [[buffer(15)]],
                  device T* out [[buffer(16)]], device float* lse [[buffer(17)]],
                  uint3 i_group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  const long rows = n.batch * n.num_heads * n.seqlen_q, row = i_group.x;
  const int i = row % n.seqlen_q, i_h = row / n.seqlen_q % n.num_heads, i_b = row / n.seqlen_q / n.num_heads;
  device const float* part_l = part_m + n.num_splits * rows;
  float m_i = minus_infinity();
  for (long s = lane; s < n.num_splits; s += 32) m_i = max(m_i, part_m[s * rows + row]);
  m_i = simd_max(m_i);
  m_i = m_i == minus_infinity() ? 0.0f : m_i;
  float l_i = 0.0f;
  for (long s = 0; s < n.num_splits; ++s) {
    l_i += weight(part_m[s * rows + row], m_i, part_l[s * rows + row], f.unit);
  }
  float sum = l_i, m_out = m_i * f.unit, older = 1.0f;
  if (HAS_SINKS) join_sink(OPERANDS_HERE.sinks[i_h], m_out, sum, older);
  older = kept(older);
  const float divisor = sum == 0.0f ? 1.0f : sum;
  device T* to = out + i_b * n.out.b + i_h * n.out.h + i * n.out.s;
  for (int c = lane; c < n.head_dim_v; c += 32) {
    float acc = 0.0f;
    for (long s = 0; s < n.num_splits; ++s) {
      acc += weight(part_m[s * rows + row], m_i, part_l[s * rows + row], f.unit) * parts[(s * rows + row) * n.head_dim_v + c];
    }
    to[c] = T(acc * older / divisor);
  }
  if (NEED_LSE && lane == 0)
    lse[i_b * n.lse.b + i_h * n.lse.h + i * n.lse.s] = sum == 0.0f ? minus_infinity() : m_out + log(divisor);
}
