// delta = rowsum(dout * out) - dlse, a row per thread. `given` has (lse, dlse), `rows` gets (lse, delta); of a row
// that saw no key lse becomes EMPTY, which the other two kernels know.

@compute @workgroup_size(64)
fn delta(@builtin(global_invocation_id) id: vec3<u32>) {
  let row = id.x + id.y * n.stride_y;
  if (row >= n.rows_total) { return; }
  var sum = 0.0;
  for (var c = 0u; c < DV4; c++) { sum += dot(load_result(row * DV4 + c), load_dout(row * DV4 + c)); }
  let lse = given[row].x;
  let empty = bitcast<u32>(lse) == MINUS_INFINITY;
  rows[row] = vec2<f32>(select(lse, EMPTY, empty), select(sum - given[row].y, 0.0, empty));
}
