// dbias = the sum of ds over whatever the bias is broadcast to: batch entries, heads, rows, keys. An element of
// the bias per thread, and one order of its sum.

fn score_gradient(b: u32, h: u32, i: u32, j: u32) -> f32 {
  let at = stand(h, b);
  if (!visible(at, h, i32(i), i32(j))) { return 0.0; }
  let row = row_of(at, i);
  let key = key_of(at, j);
  var s = 0.0;
  for (var d = 0u; d < D4; d++) { s += dot(load_q(row * D4 + d), load_k(key * D4 + d)); }
  var dp = 0.0;
  for (var c = 0u; c < DV4; c++) { dp += dot(load_dout(row * DV4 + c), load_v(key * DV4 + c)); }
  let changed = change_score(at, h, i32(i), i32(j), s, true);
//: if DROPOUT
  dp = select(0.0, dp * n.keep_scale, keep_one(at, h, i32(i), i32(j)));
//: end
  return bias_gradient(changed, dp, rows[row].x, rows[row].y);
}

@compute @workgroup_size(64)
fn backward_dbias(@builtin(global_invocation_id) id: vec3<u32>) {
  let x = id.x + id.y * n.stride_y;
  if (x >= n.dbias_b * n.dbias_h * n.dbias_q * n.dbias_k) { return; }
  let b0 = x / (n.dbias_k * n.dbias_q * n.dbias_h);
  let h0 = x / (n.dbias_k * n.dbias_q) % n.dbias_h;
  let i0 = x / n.dbias_k % n.dbias_q;
  let j0 = x % n.dbias_k;
  // a size that is one stands for all; any other is that of the call
  let b_end = select(b0 + 1u, n.batch, n.dbias_b == 1u);
  let h_end = select(h0 + 1u, n.group * n.kv_heads, n.dbias_h == 1u);
  let i_end = select(i0 + 1u, n.q_rows, n.dbias_q == 1u);
  let j_end = select(j0 + 1u, n.k_rows, n.dbias_k == 1u);
  var sum = 0.0;
  for (var b = b0; b < b_end; b++) {
    for (var h = h0; h < h_end; h++) {
      for (var i = i0; i < i_end; i++) {
        var part = 0.0;
        for (var j = j0; j < j_end; j++) { part += score_gradient(b, h, i, j); }
        sum += part;
      }
    }
  }
  dbias[x] = sum;
}
