// Causal attention and its gradients in float64, as the algorithm's formulas say, for comparison.
// q (batch, heads, rows, head_dim), k and v (batch, kv_heads, keys, head_dim), one flat array each. Row i sees
// key j if j <= i + keys - rows.

export function attention({ batch, heads, kv_heads, rows, keys, head_dim }, q, k, v, dout) {
  const made = (n) => new Float64Array(n);
  const result = {
    out: made(q.length), lse: made(batch * heads * rows), dq: made(q.length), dk: made(k.length), dv: made(v.length),
  };
  const scale = 1 / Math.sqrt(head_dim), group = heads / kv_heads, weights = made(keys);
  const dot = (x, i, y, j) => {
    let sum = 0;
    for (let d = 0; d < head_dim; d++) sum += x[i + d] * y[j + d];
    return sum;
  };
  const add = (to, i, factor, x, j) => {
    for (let d = 0; d < head_dim; d++) to[i + d] += factor * x[j + d];
  };
  for (let row = 0; row < result.lse.length; row++) {
    const i = row % rows, head = Math.floor(row / rows), b = Math.floor(head / heads);
    const seen = Math.max(0, Math.min(keys, i + keys - rows + 1));
    const first = (b * kv_heads + Math.floor((head % heads) / group)) * keys * head_dim, at = row * head_dim;
    let top = -Infinity, sum = 0;
    for (let j = 0; j < seen; j++) top = Math.max(top, (weights[j] = scale * dot(q, at, k, first + j * head_dim)));
    for (let j = 0; j < seen; j++) sum += weights[j] = Math.exp(weights[j] - top);
    for (let j = 0; j < seen; j++) add(result.out, at, (weights[j] /= sum), v, first + j * head_dim);
    result.lse[row] = top + Math.log(sum);
    const delta = dot(dout, at, result.out, at);
    for (let j = 0; j < seen; j++) {
      const key = first + j * head_dim;
      const ds = scale * weights[j] * (dot(dout, at, v, key) - delta);
      add(result.dv, key, weights[j], dout, at);
      add(result.dq, at, ds, k, key);
      add(result.dk, key, ds, q, at);
    }
  }
  return result;
}

// Multiplications and additions of a pass, two operations each: a product of matrices over the visible pairs
// twice forward, and five times backward.
export function flops({ batch, heads, rows, keys, head_dim }, pass) {
  let pairs = 0;
  for (let i = 0; i < rows; i++) pairs += Math.max(0, Math.min(keys, i + keys - rows + 1));
  return (pass === "forward" ? 2 : 5) * 2 * head_dim * pairs * batch * heads;
}

// The largest difference, as a part of the largest value; NaN if there is one.
export function error(got, want) {
  let most = 0, apart = 0;
  for (let i = 0; i < want.length; i++) {
    most = Math.max(most, Math.abs(want[i]));
    apart = Math.max(apart, Math.abs(got[i] - want[i]));
  }
  return apart / most;
}

// Marsaglia's xorshift of 32 bits: numbers in [0, 1), the same wherever it runs.
export function uniform(seed) {
  let x = seed;
  return () => {
    x ^= x << 13;
    x ^= x >>> 17;
    x ^= x << 5;
    return (x >>> 0) / 2 ** 32;
  };
}

export function normal(random, length) {
  const one = () => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
  return Float32Array.from({ length }, one);
}
