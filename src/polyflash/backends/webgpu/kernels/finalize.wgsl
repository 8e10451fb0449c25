// Results of a row: out and lse, or, of a split, its sums for `merge`.

fn finalize(at: Place, r: u32, c: u32, acc: vec4<f32>, l_i: f32) {
//: if SPLIT
  out[(at.split * n.rows_total + row_of(at, r)) * DV4 + c] = acc;
//: else
  out[row_of(at, r) * DV4 + c] = store_out(over(acc, l_i));
//: end
}

fn finalize_row(at: Place, r: u32, m_i: f32, l_i: f32) {
//: if SPLIT
  lse[at.split * n.rows_total + row_of(at, r)] = vec2<f32>(m_i, l_i);
//: else
//: if LSE
  lse[row_of(at, r)] = lse_of(m_i, l_i);
//: end
//: end
}
