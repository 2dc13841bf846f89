/** A model compiled by mithril, which runs on WebGPU or, where that is missing, as WebAssembly. Types: model.d.ts. */
const ARRAYS = {
  float32: Float32Array, int32: Int32Array, uint32: Uint32Array, int16: Int16Array, uint16: Uint16Array, int8: Int8Array,
  uint8: Uint8Array, bool: Uint8Array, float16: Uint16Array, bfloat16: Uint16Array,
};
const WORDS = { float32: Float32Array, int32: Int32Array, int16: Int32Array, int8: Int32Array }; // of a GPU, else Uint32Array
const TRUNCATED = 'a loop reached its limit of steps, or an index is past the end of a buffer; states are unchanged';

async function file(name, base) {
  const url = new URL(name, base);
  const node = url.protocol === 'file:' && typeof window === 'undefined';
  if (node) return new Uint8Array(await (await import(/* @vite-ignore */ 'node:fs/promises')).readFile(url)).buffer;
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url} cannot be read: ${response.status} ${response.statusText}`);
  return response.arrayBuffer();
}
const text = async (name, base) => new TextDecoder().decode(await file(name, base));

/** Returns the arguments of a run as copies, which later changes of the caller's arrays do not reach. */
function checked(specs, given = {}) {
  for (const name in given) if (!specs.some((s) => s.name === name)) throw new TypeError(`the model has no input '${name}'`);
  return specs.map(({ name, dtype, shape, size }) => {
    const x = given[name], want = ARRAYS[dtype];
    if (x instanceof want && x.length === size) return x.slice();
    const got = x == null ? 'missing' : `a ${x.constructor.name} of ${x.length} elements`;
    throw new TypeError(`input '${name}' must be a ${want.name} of ${size} elements, ${dtype}[${shape}]; it is ${got}`);
  });
}

async function onGPU(adapter, { inputs, outputs, webgpu: p }, weights, source) {
  const device = await adapter.requestDevice(); // with the default limits
  let problem = null, encoder = null, pass = null;
  device.lost.then((info) => { problem ??= `the GPU was lost: ${info.message}`; });
  device.addEventListener('uncapturederror', ({ error }) => { problem ??= error.message; });
  const check = () => { if (problem) throw new Error(`${problem}; load the model again`); };
  const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
  device.pushErrorScope('out-of-memory');
  const buffers = p.buffers.map((size) => device.createBuffer({ size: Math.max(4, size), usage }));
  if ((problem ??= (await device.popErrorScope())?.message)) check();
  const write = (k, dtype, x) => device.queue.writeBuffer(buffers[k], 0, new (WORDS[dtype] ?? Uint32Array)(x));
  const fill = (onlyStates) => p.stored.filter((s) => s.state || !onlyStates).forEach(({ buffer, offset, dtype, size }) => {
    write(buffer, dtype, new ARRAYS[dtype](weights, offset, size));
  });
  fill(false);
  const codes = source.split(/^\/\/ -- .*\n/m).slice(1);
  const pipelines = await Promise.all(p.launches.map(({ name: entryPoint }, k) => device.createComputePipelineAsync({
    layout: 'auto', compute: { module: device.createShaderModule({ code: codes[k] }), entryPoint },
  })));
  const groups = new Map(); // of bindings, by step
  const group = (step, [, kernel, numbers] = step) => groups.get(step) ?? groups.set(step, device.createBindGroup({
    layout: pipelines[kernel].getBindGroupLayout(0),
    entries: numbers.map((n, binding) => ({ binding, resource: { buffer: buffers[n] } })),
  })).get(step);
  const encode = (computes) => {
    encoder ??= device.createCommandEncoder();
    pass = computes ? pass ?? encoder.beginComputePass() : pass?.end();
    return pass ?? encoder;
  };
  const submit = () => { if (encoder) encoder = device.queue.submit([encode(false).finish()]); };
  async function read(k) {
    const { size } = buffers[k], target = device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    encode(false).copyBufferToBuffer(buffers[k], 0, target, 0, size);
    submit();
    await target.mapAsync(GPUMapMode.READ);
    check();
    const copy = target.getMappedRange().slice(0);
    target.destroy();
    return copy;
  }
  const holds = async (k) => new Uint32Array(await read(k))[0] !== 0;
  async function perform(steps, turn) {
    for (const step of steps) {
      const [kind, a, b, c, d, e] = step;
      if (kind === 'run') {
        encode(true).setPipeline(pipelines[a]);
        pass.setBindGroup(0, group(step));
        pass.dispatchWorkgroups(...p.launches[a].groups);
      } else if (kind === 'copy') encode(false).copyBufferToBuffer(buffers[a], turn * d, buffers[b], turn * e, c);
      else if (kind === 'if') await perform((await holds(a)) ? b : c, 0);
      else if (kind === 'count') for (let k = 0; k < a; ++k) await perform(b, c ? a - 1 - k : k);
      else for (let k = 0; d === null || k < d; ++k) { // a loop with a condition
        await perform(b, 0);
        if (!(await holds(a))) break;
        await perform(c, 0);
      }
    }
  }
  return {
    async run(arrays) {
      check();
      inputs.forEach(({ name, dtype }, k) => write(p.inputs[name], dtype, arrays[k]));
      await perform(p.steps, 0);
      for (const k of p.flags) if (await holds(k)) throw new RangeError(TRUNCATED);
      const results = {};
      for (const { name, dtype, size } of outputs) {
        results[name] = new ARRAYS[dtype](new (WORDS[dtype] ?? Uint32Array)(await read(p.outputs[name]), 0, size));
      }
      await perform(p.next, 0);
      submit();
      return results;
    },
    reset: () => fill(true), close: () => device.destroy(),
  };
}

async function onCPU({ inputs, outputs }, weights, code) {
  const { instance: { exports: c } } = await WebAssembly.instantiate(code, {});
  let top = c.__heap_base.value;
  const reserve = (size, at = Math.ceil(top / 64) * 64) => {
    top = at + size;
    const missing = Math.ceil((top - c.memory.buffer.byteLength) / 65536);
    if (missing > 0) c.memory.grow(missing);
    return at;
  };
  const self = reserve(c.model_instance_size()), arena = reserve(c.model_arena_size()), stored = reserve(weights.byteLength);
  const at = [...inputs, ...outputs].map(({ dtype, size }) => reserve(size * ARRAYS[dtype].BYTES_PER_ELEMENT));
  const view = ({ dtype, size }, k) => new ARRAYS[dtype](c.memory.buffer, at[k], size);
  new Uint8Array(c.memory.buffer).set(new Uint8Array(weights), stored);
  if (c.model_init(self, arena) || c.model_set_weights(self, stored)) throw new Error('the weights do not fit the model');
  return {
    async run(arrays) {
      inputs.forEach((spec, k) => view(spec, k).set(arrays[k]));
      if (c.model_run(self, ...at)) throw new RangeError(TRUNCATED);
      return Object.fromEntries(outputs.map((spec, k) => [spec.name, view(spec, inputs.length + k).slice()]));
    },
    reset: () => { c.model_reset?.(self); }, close: () => {},
  };
}

export async function load({ device, base = import.meta.url } = {}) {
  const about = JSON.parse(await text('model.json', base)), weights = await file('model.weights', base);
  let engine = null, reason = '', { gpu } = globalThis.navigator ?? {};
  if (device !== 'wasm') try {
    const adapter = await gpu?.requestAdapter();
    if (!adapter) throw new Error(gpu ? 'WebGPU found no GPU' : 'WebGPU is missing here');
    engine = await onGPU(adapter, about, weights, await text('model.wgsl', base));
  } catch (error) {
    if (device === 'webgpu' || !about.wasm) throw error;
    reason = error.message;
  } else if (!about.wasm) throw new Error('the model was exported without WebAssembly');
  const used = engine ? 'webgpu' : 'wasm';
  engine ??= await onCPU(about, weights, await file('model.wasm', base));
  let last = Promise.resolve();
  const inTurn = (task) => (last = last.then(task, task)); // a run uses the buffers of the one before it
  return {
    device: used, reason, inputs: about.inputs, outputs: about.outputs,
    async run(inputs) { const arrays = checked(about.inputs, inputs); return inTurn(() => engine.run(arrays)); },
    reset: () => inTurn(engine.reset), close: () => inTurn(engine.close),
  };
}
