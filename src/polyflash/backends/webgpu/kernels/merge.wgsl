// merge: the splits of a row as one. A thread has four channels of a row.
//
//     m = max m_s     l = sum l_s * exp(m_s - m)     out = sum acc_s * exp(m_s - m) / l     lse = m + ln l

@compute @workgroup_size(64)
fn merge(@builtin(global_invocation_id) id: vec3<u32>) {
  let x = id.x + id.y * n.stride_y;
  if (x >= n.rows_total * DV4) { return; }
  let row = x / DV4;
  var m = LOWEST;
  for (var s = 0u; s < n.num_splits; s++) {
    let part = parts_lse[s * n.rows_total + row];
    m = select(max(m, part.x), m, part.y == 0.0);
  }
  var l = 0.0;
  var acc = vec4<f32>(0.0);
  for (var s = 0u; s < n.num_splits; s++) {
    let part = parts_lse[s * n.rows_total + row];
    if (part.y == 0.0) { continue; }  // not `!= 0`, of which some compilers say that a NaN is not
    let alpha = share(part.x - m);
    l += part.y * alpha;
    acc += parts[(s * n.rows_total + row) * DV4 + x % DV4] * alpha;
  }
  out[x] = store_out(over(acc, l));
//: if LSE
  if (x % DV4 == 0u) { lse[row] = lse_of(m, l); }
//: end
}
