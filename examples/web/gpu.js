// Plays kernels.json on WebGPU: the pipelines, buffers and dispatches that polyflash's WebGPU engine would make.
// A buffer has the name that it has in a kernel's text: q, k, v, out, lse, dout, dq, dk, dv.

const WHY_NONE =
  "This browser offers no WebGPU adapter. Chrome and Edge 113, Safari 26 and Firefox 141 have one; the page must " +
  "come from https:// or from http://localhost.";

export async function open(facts) {
  const adapter = navigator.gpu && (await navigator.gpu.requestAdapter({ powerPreference: "high-performance" }));
  if (!adapter) throw new Error(WHY_NONE);
  const requiredFeatures = ["subgroups"].filter((name) => adapter.features.has(name));
  const device = await adapter.requestDevice({ requiredFeatures });
  return new Gpu(adapter.info, device, facts);
}

export class Gpu {
  constructor(info, device, facts) {
    this.device = device;
    this.facts = facts;
    this.pipelines = new Map();
    const words = [info.vendor, info.architecture, info.device, info.description].filter(Boolean);
    this.name = [...new Set(words)].join(" ") || "an adapter without a name";
    // A CPU that executes shaders is given loops: its compiler takes minutes over what a graphics card's likes.
    this.machine = info.isFallbackAdapter || /swiftshader|llvmpipe|basic render/i.test(this.name) ? "cpu" : "gpu";
    this.subgroup = device.features.has("subgroups") ? (info.subgroupMinSize ?? 0) : 0;
    this.error = null; // the first that the device reported after the fact
    device.addEventListener("uncapturederror", (event) => (this.error ??= event.error.message));
    device.lost.then((lost) => (this.error ??= `the device was lost: ${lost.message}`));
  }

  // The calls of a problem that this device can run, one per template.
  calls(problem) {
    const fits = (x) => x.problem === problem && x.machine === this.machine && x.subgroup <= this.subgroup;
    return this.facts.calls.filter(fits);
  }

  async pipeline(number) {
    if (!this.pipelines.has(number)) this.pipelines.set(number, await this.#compile(this.facts.kernels[number]));
    return this.pipelines.get(number);
  }

  async #compile({ entry, code }) {
    const module = this.device.createShaderModule({ code, label: entry });
    const wrong = (await module.getCompilationInfo()).messages.find((x) => x.type === "error");
    if (wrong) throw new Error(`${entry}, line ${wrong.lineNum}: ${wrong.message}`);
    const kinds = { uniform: "uniform", "storage, read": "read-only-storage", "storage, read_write": "storage" };
    const bound = [...code.matchAll(/@binding\((\d+)\) var<([^>]+)> (\w+):/g)];
    const entries = bound.map(([, binding, kind]) => ({
      binding: Number(binding), visibility: GPUShaderStage.COMPUTE, buffer: { type: kinds[kind] },
    }));
    const group = this.device.createBindGroupLayout({ entries });
    const layout = this.device.createPipelineLayout({ bindGroupLayouts: [group] });
    const pipeline = await this.device.createComputePipelineAsync({ layout, compute: { module, entryPoint: entry } });
    return { pipeline, group };
  }

  async ready(call) {
    const made = new Call(this, call);
    await made.prepare();
    return made;
  }
}

// One call, with its gradients: write its operands, run a pass, read its results.
class Call {
  constructor(gpu, facts) {
    this.gpu = gpu;
    this.facts = facts;
    this.passes = { forward: [], backward: [] };
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    const make = ([name, size]) => [name, gpu.device.createBuffer({ size, usage, label: name })];
    this.buffers = Object.fromEntries(Object.entries(facts.bytes).map(make));
    this.buffers.words = gpu.device.createBuffer({ size: 4 * facts.words.length, usage });
    gpu.device.queue.writeBuffer(this.buffers.words, 0, new Uint32Array(facts.words));
  }

  async prepare() {
    const { device } = this.gpu;
    for (const pass of ["forward", "backward"]) {
      for (const { kernel, numbers, grid, buffers } of this.facts[pass]) {
        const { pipeline, group } = await this.gpu.pipeline(kernel);
        const usage = GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST;
        const n = device.createBuffer({ size: 4 * numbers.length, usage });
        device.queue.writeBuffer(n, 0, new Uint32Array(numbers));
        const bound = [n, this.buffers.words, ...buffers.map((name) => this.buffers[name])];
        const entries = bound.map((buffer, binding) => ({ binding, resource: { buffer } }));
        this.passes[pass].push({ pipeline, grid, bound: device.createBindGroup({ layout: group, entries }) });
      }
    }
  }

  write(operands) {
    for (const [name, x] of Object.entries(operands)) this.gpu.device.queue.writeBuffer(this.buffers[name], 0, x);
  }

  run(pass) {
    const encoder = this.gpu.device.createCommandEncoder({ label: pass });
    const compute = encoder.beginComputePass();
    for (const { pipeline, grid, bound } of this.passes[pass]) {
      compute.setPipeline(pipeline);
      compute.setBindGroup(0, bound);
      compute.dispatchWorkgroups(...grid);
    }
    compute.end();
    this.gpu.device.queue.submit([encoder.finish()]);
  }

  async read(...names) {
    const { device } = this.gpu;
    const sizes = names.map((name) => this.buffers[name].size);
    const size = sizes.reduce((a, b) => a + b, 0);
    this.staging ??= {};
    const staging = (this.staging[names] ??= device.createBuffer({
      size, usage: GPUBufferUsage.COPY_DST | GPUBufferUsage.MAP_READ,
    }));
    const encoder = device.createCommandEncoder({ label: "read" });
    let at = 0;
    for (const [i, name] of names.entries()) {
      encoder.copyBufferToBuffer(this.buffers[name], 0, staging, at, sizes[i]);
      at += sizes[i];
    }
    device.queue.submit([encoder.finish()]);
    await staging.mapAsync(GPUMapMode.READ);
    const all = new Float32Array(staging.getMappedRange().slice(0));
    staging.unmap();
    if (this.gpu.error) throw new Error(this.gpu.error);
    at = 0;
    return Object.fromEntries(names.map((name, i) => [name, all.subarray(at / 4, (at += sizes[i]) / 4)]));
  }

  // out and lse.
  async forward(q, k, v) {
    this.write({ q, k, v });
    this.run("forward");
    return this.read("out", "lse");
  }

  // dq, dk and dv of the call before.
  async backward(out, lse, dout) {
    const given = new Float32Array(2 * lse.length); // lse and its gradient, which is none
    lse.forEach((x, i) => (given[2 * i] = x));
    this.write({ result: out, dout, given });
    this.run("backward");
    return this.read("dq", "dk", "dv");
  }

  free() {
    for (const buffer of [...Object.values(this.buffers), ...Object.values(this.staging ?? {})]) buffer.destroy();
  }
}
