// A character model in plain JavaScript, float32: embeddings, then layers of causal attention and a perceptron, each
// behind a norm and added to its input. Attention and its gradients are whatever `layers` offers: here, a GPU.

import { uniform } from "./reference.js";

const matrix = (rows, columns) => new Float32Array(rows * columns);

// c += a @ b; a is (m, k) and b (k, n).
function multiply(a, b, m, k, n, c = matrix(m, n)) {
  for (let i = 0; i < m; i++) {
    for (let x = 0; x < k; x++) {
      const factor = a[i * k + x];
      for (let j = 0; j < n; j++) c[i * n + j] += factor * b[x * n + j];
    }
  }
  return c;
}

function transpose(a, m, n) {
  const result = matrix(n, m);
  for (let i = 0; i < m; i++) for (let j = 0; j < n; j++) result[j * m + i] = a[i * n + j];
  return result;
}

// Rows with a mean of zero and a variance of one; and how each was scaled.
function normalise(x, width) {
  const y = new Float32Array(x.length), scales = new Float32Array(x.length / width);
  for (let r = 0; r < scales.length; r++) {
    const row = x.subarray(r * width, (r + 1) * width);
    const mean = row.reduce((a, b) => a + b, 0) / width;
    const variance = row.reduce((a, b) => a + (b - mean) ** 2, 0) / width;
    scales[r] = 1 / Math.sqrt(variance + 1e-5);
    row.forEach((value, c) => (y[r * width + c] = (value - mean) * scales[r]));
  }
  return { y, scales };
}

function normalise_backward({ y, scales }, dy, width, dx) {
  for (let r = 0; r < scales.length; r++) {
    let mean = 0, along = 0;
    for (let c = r * width; c < (r + 1) * width; c++) {
      mean += dy[c] / width;
      along += (dy[c] * y[c]) / width;
    }
    for (let c = r * width; c < (r + 1) * width; c++) dx[c] += scales[r] * (dy[c] - mean - y[c] * along);
  }
}

export class Model {
  // `settings`: training.json. `layers`: per layer, forward(q, k, v) -> {out, lse} and
  // backward(out, lse, dout) -> {dq, dk, dv}.
  constructor(settings, layers) {
    Object.assign(this, settings, { layers, moment: 0 });
    this.alphabet = [...new Set(this.text)].sort();
    this.ids = Int32Array.from(this.text, (c) => this.alphabet.indexOf(c));
    this.random = uniform(this.seed);
    this.parameters = {};
    const w = this.width, wide = 1 / Math.sqrt(w);
    this.#add("characters", this.alphabet.length, w, 0.5);
    this.#add("places", this.rows, w, 0.5);
    for (let i = 0; i < layers.length; i++) {
      this.#add(`qkv${i}`, w, 3 * w, wide);
      this.#add(`out${i}`, w, w, wide);
      this.#add(`up${i}`, w, 4 * w, wide);
      this.#add(`down${i}`, 4 * w, w, wide / 2);
    }
    this.#add("head", w, this.alphabet.length, wide);
  }

  #add(name, rows, columns, size) {
    const value = matrix(rows, columns).map(() => (2 * this.random() - 1) * size);
    const zeros = () => matrix(rows, columns);
    this.parameters[name] = { value, rows, columns, gradient: zeros(), first: zeros(), second: zeros() };
  }

  // A product with a parameter, of all tokens; and its gradients.
  #times(x, name) {
    const { value, rows, columns } = this.parameters[name];
    return multiply(x, value, x.length / rows, rows, columns);
  }

  #times_backward(x, name, dy) {
    const { value, rows, columns, gradient } = this.parameters[name];
    const tokens = x.length / rows;
    multiply(transpose(x, tokens, rows), dy, rows, tokens, columns, gradient);
    return multiply(dy, transpose(value, rows, columns), tokens, columns, rows);
  }

  // Where channel c of token t of part 0, 1, 2 (q, k, v) stands in (batch, heads, rows, head_dim).
  #heads(t, c) {
    const head_dim = this.width / this.heads;
    const b = Math.floor(t / this.rows), h = Math.floor(c / head_dim);
    return ((b * this.heads + h) * this.rows + (t % this.rows)) * head_dim + (c % head_dim);
  }

  #each(visit) {
    for (let t = 0; t < this.batch * this.rows; t++) for (let c = 0; c < this.width; c++) visit(t, c, this.#heads(t, c));
  }

  // The loss of a batch, in nats per character, and its gradients.
  async loss(inputs, targets) {
    const w = this.width, tokens = inputs.length, { characters, places } = this.parameters;
    let x = matrix(tokens, w);
    for (let t = 0; t < tokens; t++) {
      for (let c = 0; c < w; c++) {
        x[t * w + c] = characters.value[inputs[t] * w + c] + places.value[(t % this.rows) * w + c];
      }
    }
    const kept = [];
    for (let i = 0; i < this.layers.length; i++) {
      const layer = await this.#layer(i, x);
      kept.push(layer);
      x = layer.x;
    }
    const last = normalise(x, w);
    const logits = this.#times(last.y, "head");
    const { loss, gradient } = cross_entropy(logits, targets, this.alphabet.length);
    const dx = matrix(tokens, w);
    normalise_backward(last, this.#times_backward(last.y, "head", gradient), w, dx);
    for (let i = this.layers.length - 1; i >= 0; i--) await this.#layer_backward(i, kept[i], dx);
    for (let t = 0; t < tokens; t++) {
      for (let c = 0; c < w; c++) {
        characters.gradient[inputs[t] * w + c] += dx[t * w + c];
        places.gradient[(t % this.rows) * w + c] += dx[t * w + c];
      }
    }
    return loss;
  }

  async #layer(i, given) {
    const w = this.width, x = given.slice(), before = normalise(x, w);
    const qkv = this.#times(before.y, `qkv${i}`);
    const parts = [0, 1, 2].map(() => new Float32Array(x.length));
    this.#each((t, c, at) => parts.forEach((part, p) => (part[at] = qkv[t * 3 * w + p * w + c])));
    const { out, lse } = await this.layers[i].forward(...parts);
    const attended = new Float32Array(x.length);
    this.#each((t, c, at) => (attended[t * w + c] = out[at]));
    this.#times(attended, `out${i}`).forEach((value, at) => (x[at] += value));
    const middle = normalise(x, w), up = this.#times(middle.y, `up${i}`);
    const active = up.map((value) => value / (1 + Math.exp(-value))); // silu
    this.#times(active, `down${i}`).forEach((value, at) => (x[at] += value));
    return { x, before, out, lse, attended, middle, up, active };
  }

  async #layer_backward(i, kept, dx) {
    const w = this.width;
    const dup = this.#times_backward(kept.active, `down${i}`, dx);
    kept.up.forEach((value, at) => {
      const s = 1 / (1 + Math.exp(-value));
      dup[at] *= s * (1 + value * (1 - s));
    });
    normalise_backward(kept.middle, this.#times_backward(kept.middle.y, `up${i}`, dup), w, dx);
    const dattended = this.#times_backward(kept.attended, `out${i}`, dx);
    const dout = new Float32Array(dx.length);
    this.#each((t, c, at) => (dout[at] = dattended[t * w + c]));
    const { dq, dk, dv } = await this.layers[i].backward(kept.out, kept.lse, dout);
    const dqkv = new Float32Array(3 * dx.length);
    this.#each((t, c, at) => [dq, dk, dv].forEach((part, p) => (dqkv[t * 3 * w + p * w + c] = part[at])));
    normalise_backward(kept.before, this.#times_backward(kept.before.y, `qkv${i}`, dqkv), w, dx);
  }

  // One step of Adam on random places of the text; the loss before it.
  async step() {
    const inputs = [], targets = [];
    for (let b = 0; b < this.batch; b++) {
      const start = Math.floor(this.random() * (this.ids.length - this.rows));
      inputs.push(...this.ids.subarray(start, start + this.rows));
      targets.push(...this.ids.subarray(start + 1, start + this.rows + 1));
    }
    const loss = await this.loss(inputs, targets);
    this.moment += 1;
    const [slow, slower] = this.decay, fix = 1 - slow ** this.moment, fixed = 1 - slower ** this.moment;
    for (const { value, gradient, first, second } of Object.values(this.parameters)) {
      for (let i = 0; i < value.length; i++) {
        first[i] = slow * first[i] + (1 - slow) * gradient[i];
        second[i] = slower * second[i] + (1 - slower) * gradient[i] ** 2;
        value[i] -= (this.rate * first[i]) / fix / (Math.sqrt(second[i] / fixed) + this.epsilon);
        gradient[i] = 0;
      }
    }
    return loss;
  }
}

function cross_entropy(logits, targets, size) {
  const gradient = new Float32Array(logits.length), tokens = targets.length;
  let loss = 0;
  for (let t = 0; t < tokens; t++) {
    const row = logits.subarray(t * size, (t + 1) * size), top = Math.max(...row);
    const sum = row.reduce((a, b) => a + Math.exp(b - top), 0);
    loss -= (row[targets[t]] - top - Math.log(sum)) / tokens;
    row.forEach((x, c) => (gradient[t * size + c] = (Math.exp(x - top) / sum - (c === targets[t])) / tokens));
  }
  return { loss, gradient };
}
