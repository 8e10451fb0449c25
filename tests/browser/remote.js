// Executes lists of WebGPU commands that a Python process sends. Objects have numbers; data are base64.

globalThis.remote = { objects: new Map(), error: null, lost: false };

const bytes_of = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const text_of = (bytes) => {
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
};

remote.open = async (limits) => {
  const adapter = await navigator.gpu.requestAdapter();
  const features = ["subgroups", "shader-f16"].filter((name) => adapter.features.has(name));
  const requiredLimits = Object.fromEntries(limits.map((name) => [name, adapter.limits[name]]));
  remote.device = await adapter.requestDevice({ requiredFeatures: features, requiredLimits });
  remote.lost = false;
  remote.device.addEventListener("uncapturederror", (event) => (remote.error ??= event.error.message));
  return { features, limits: requiredLimits, name: `${adapter.info.vendor} ${adapter.info.architecture}` };
};

const commands = {
  buffer: (id, size, usage) => remote.objects.set(id, remote.device.createBuffer({ size, usage })),
  async module(id, code, label) {
    remote.device.pushErrorScope("validation"); // what is wrong with the text is said here, and not again later
    const module = remote.device.createShaderModule({ code, label });
    await remote.device.popErrorScope();
    const wrong = (await module.getCompilationInfo()).messages.find((x) => x.type === "error");
    if (wrong) throw new Error(`${label}, line ${wrong.lineNum}: ${wrong.message}`);
    remote.objects.set(id, module);
  },
  group_layout: (id, entries) => remote.objects.set(id, remote.device.createBindGroupLayout({ entries })),
  layout(id, groups) {
    const bindGroupLayouts = groups.map((x) => remote.objects.get(x));
    remote.objects.set(id, remote.device.createPipelineLayout({ bindGroupLayouts }));
  },
  async pipeline(id, layout, module, entryPoint) {
    const compute = { module: remote.objects.get(module), entryPoint };
    const given = { layout: layout === "auto" ? "auto" : remote.objects.get(layout), compute };
    remote.objects.set(id, await remote.device.createComputePipelineAsync(given));
  },
  layout_of: (id, pipeline) => remote.objects.set(id, remote.objects.get(pipeline).getBindGroupLayout(0)),
  group(id, layout, bound) {
    const entries = bound.map(([binding, buffer, offset, size]) => ({
      binding, resource: { buffer: remote.objects.get(buffer), offset, size },
    }));
    remote.objects.set(id, remote.device.createBindGroup({ layout: remote.objects.get(layout), entries }));
  },
  write: (id, offset, data) => remote.device.queue.writeBuffer(remote.objects.get(id), offset, bytes_of(data)),
  submit(recorded) {
    const encoder = remote.device.createCommandEncoder();
    for (const [what, ...given] of recorded) {
      if (what === "copy") {
        const [from, start, to, end, size] = given;
        encoder.copyBufferToBuffer(remote.objects.get(from), start, remote.objects.get(to), end, size);
        continue;
      }
      const [pipeline, group, grid] = given, compute = encoder.beginComputePass();
      compute.setPipeline(remote.objects.get(pipeline));
      compute.setBindGroup(0, remote.objects.get(group));
      compute.dispatchWorkgroups(...grid);
      compute.end();
    }
    remote.device.queue.submit([encoder.finish()]);
  },
  async read(id, offset, size) {
    const buffer = remote.objects.get(id);
    await buffer.mapAsync(GPUMapMode.READ, offset, size);
    const text = text_of(new Uint8Array(buffer.getMappedRange(offset, size)));
    buffer.unmap();
    return text;
  },
  destroy() {
    remote.device.destroy();
    remote.lost = true;
  },
  forget: (...ids) => ids.forEach((id) => remote.objects.delete(id)),
};

// The result of the last command.
remote.run = async (list) => {
  let result;
  for (const [name, ...given] of list) {
    if (remote.lost && name !== "forget") throw new Error("the device is lost");
    result = await commands[name](...given);
  }
  if (remote.error) {
    const message = remote.error;
    remote.error = null;
    throw new Error(message);
  }
  return result ?? null;
};
