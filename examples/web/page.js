// The page: checks the kernels when it opens, measures and trains when asked. With ?report it does all three and
// sends what it found to the server it came from.

import { open } from "./gpu.js";
import { Model } from "./model.js";
import { attention, error, flops, normal, uniform } from "./reference.js";

const BOUND = 1e-5; // of an error, in float32: some hundred roundings
const at = (id) => document.getElementById(id);
const say = (text) => (at("status").textContent = text);
const load = async (file) => (await fetch(file)).json();
const short = (x) => (x < 100 ? x.toPrecision(3) : x.toFixed(0));
const seconds = () => performance.now() / 1e3;

function table(head, rows) {
  const line = (cells, tag) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const x = row.appendChild(document.createElement(tag));
      x.textContent = cell;
      if (String(cell).includes("wrong")) x.className = "wrong";
    }
    return row;
  };
  const made = document.createElement("table");
  made.append(line(head, "th"), ...rows.map((cells) => line(cells, "td")));
  return made;
}

function svg(width, height, body) {
  const made = document.createElement("div");
  made.innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="img">${body}</svg>`;
  return made.firstChild;
}

// Horizontal bars, each with a label and a value.
function bars(items) {
  const most = Math.max(...items.map((x) => x.value));
  const one = ({ label, value, color }, i) =>
    `<text x="0" y="${i * 40 + 14}">${label}: ${short(value)} GFLOP/s</text>` +
    `<rect x="0" y="${i * 40 + 19}" width="${(360 * value) / most}" height="12" rx="2" fill="var(--${color})"/>`;
  return svg(360, 40 * items.length, items.map(one).join(""));
}

// Loss over steps.
function curve(losses, steps) {
  const top = Math.ceil(Math.max(...losses));
  const x = (i) => 24 + (330 * i) / (steps - 1), y = (loss) => 170 - (155 * loss) / top;
  const points = losses.map((loss, i) => `${x(i).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  const grid = Array.from({ length: top + 1 }, (_, i) =>
    `<path d="M24 ${y(i)}H354" stroke="var(--line)"/><text x="16" y="${y(i) + 4}" text-anchor="end">${i}</text>`);
  const last = losses.length - 1;
  return svg(360, 190, grid.join("") +
    `<polyline points="${points}" fill="none" stroke="var(--blue)" stroke-width="2"/>` +
    `<circle cx="${x(last)}" cy="${y(losses[last])}" r="3" fill="var(--orange)"/>` +
    `<text x="354" y="186" text-anchor="end">step ${losses.length}, ${losses[last].toFixed(3)} nats per character</text>`);
}

function operands(problem) {
  const { batch, heads, kv_heads, rows, keys, head_dim } = problem, random = uniform(1);
  const [of_q, of_k] = [batch * heads * rows * head_dim, batch * kv_heads * keys * head_dim];
  return [of_q, of_k, of_k, of_q].map((length) => normal(random, length));
}

async function check(gpu) {
  const results = [];
  for (const problem of ["check", "check 64"]) {
    for (const facts of gpu.calls(problem)) {
      say(`Checking ${facts.template}, head_dim ${facts.head_dim} …`);
      const [q, k, v, dout] = operands(facts), call = await gpu.ready(facts);
      const got = await call.forward(q, k, v);
      Object.assign(got, await call.backward(got.out, got.lse, dout));
      const want = attention(facts, q, k, v, dout);
      const errors = Object.fromEntries(Object.keys(want).map((name) => [name, error(got[name], want[name])]));
      const right = Object.values(errors).every((x) => x < BOUND);
      results.push({ template: facts.template, head_dim: facts.head_dim, right, errors });
      call.free();
    }
  }
  const row = ({ template, head_dim, right, errors: { out, lse, ...rest } }) =>
    [`${template}, ${head_dim}`, ...[out, lse, Math.max(...Object.values(rest))].map((x) => x.toExponential(0)), right ? "right" : "wrong"];
  at("checks").replaceChildren(table(["kernel, head_dim", "out", "lse", "gradients", ""], results.map(row)));
  return results;
}

async function time(gpu, call, pass) {
  let repeats = 1;
  for (;;) {
    const start = seconds();
    for (let i = 0; i < repeats; i++) call.run(pass);
    await gpu.device.queue.onSubmittedWorkDone();
    const spent = seconds() - start;
    if (spent > 0.3) return spent / repeats;
    repeats = Math.min(8 * repeats, Math.ceil((0.4 * repeats) / Math.max(spent, 1e-3)));
  }
}

async function measure(gpu) {
  const results = [], known = new Set();
  for (const problem of ["speed", "large"]) {
    for (const facts of gpu.calls(problem)) {
      const [q, k, v, dout] = operands(facts), call = await gpu.ready(facts);
      const { out, lse } = await call.forward(q, k, v);
      await call.backward(out, lse, dout);
      for (const pass of ["forward", "backward"]) {
        const same = JSON.stringify([problem, facts[pass].map((launch) => launch.kernel)]);
        if (known.has(same)) continue; // templates share gradients
        known.add(same);
        say(`Measuring ${pass}, ${facts.template}, ${facts.rows} rows …`);
        const spent = await time(gpu, call, pass);
        const label = `${pass}, ${facts.template}`;
        results.push({ label, rows: facts.rows, ms: 1e3 * spent, gflops: flops(facts, pass) / spent / 1e9 });
      }
      call.free();
    }
  }
  const largest = Math.max(...results.map((x) => x.rows));
  const drawn = results.filter((x) => x.rows === largest).map((x) => ({
    label: x.label, value: x.gflops, color: x.label.startsWith("backward") ? "orange" : "blue",
  }));
  const row = (x) => [x.label, x.rows, ...[x.ms, x.gflops].map(short)];
  at("speeds").replaceChildren(bars(drawn), table(["pass", "rows", "ms", "GFLOP/s"], results.map(row)));
  return results;
}

async function train(gpu) {
  const settings = await load("training.json"), layers = [], losses = [];
  for (let i = 0; i < settings.layers; i++) layers.push(await gpu.ready(gpu.calls("train")[0]));
  const model = new Model(settings, layers), start = seconds();
  for (let i = 0; i < settings.steps; i++) {
    losses.push(await model.step());
    if (i % 5 === 4) {
      at("losses").replaceChildren(curve(losses, settings.steps));
      say(`${i + 1} steps, ${((1e3 * (seconds() - start)) / (i + 1)).toFixed(0)} ms each`);
      await new Promise(requestAnimationFrame);
    }
  }
  layers.forEach((layer) => layer.free());
  return losses;
}

async function main() {
  const gpu = await open(await load("kernels.json"));
  const lanes = gpu.subgroup ? `subgroups of ${gpu.subgroup} or more` : "no subgroups";
  at("device").textContent = `${gpu.name}: ${lanes}${gpu.machine === "cpu" ? "; a CPU that executes shaders" : ""}.`;
  const found = { device: gpu.name, machine: gpu.machine, subgroup: gpu.subgroup, checks: await check(gpu) };
  const buttons = { measure, train };
  const start = async (name) => {
    for (const x of Object.keys(buttons)) at(x).disabled = true;
    try {
      found[name] = await buttons[name](gpu);
      say("");
    } finally {
      for (const x of Object.keys(buttons)) at(x).disabled = false;
    }
  };
  for (const name of Object.keys(buttons)) {
    at(name).onclick = () => start(name).catch(fail);
    at(name).disabled = false;
  }
  say("");
  if (asked) for (const name of Object.keys(buttons)) await start(name);
  return found;
}

function fail(reason) {
  at("status").className = "wrong";
  say(reason.message);
  if (at("device").textContent.startsWith("Looking")) at("device").textContent = "";
  return { failed: `${reason.message}\n${reason.stack}` };
}

const asked = new URLSearchParams(location.search).has("report");
const found = await main().catch(fail);
if (asked) await fetch("report", { method: "POST", body: JSON.stringify(found) });
