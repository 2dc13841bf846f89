"""Files of the package of npm: its manifest, the types of TypeScript, the README."""

from __future__ import annotations

import json
from typing import Any

from mithril import __version__
from mithril_webgpu.web.description import Description

ARRAYS = {
    "float32": "Float32Array",
    "int32": "Int32Array",
    "uint32": "Uint32Array",
    "int16": "Int16Array",
    "uint16": "Uint16Array",
    "int8": "Int8Array",
    "uint8": "Uint8Array",
    "bool": "Uint8Array",
    "float16": "Uint16Array",
    "bfloat16": "Uint16Array",
}
BITS = {"float16": ", as bits", "bfloat16": ", as bits"}
FILES = ("model.js", "model.d.ts", "model.json", "model.wgsl", "model.weights", "model.check", "index.html")


def manifest(name: str, webassembly: bool) -> str:
    values = {
        "name": name,
        "version": "1.0.0",
        "description": f"A model compiled by mithril {__version__}",
        "type": "module",
        "exports": {".": {"types": "./model.d.ts", "default": "./model.js"}, "./*": "./*"},
        "types": "./model.d.ts",
        "files": [*FILES, *(["model.wasm"] if webassembly else [])],
        "sideEffects": False,
    }
    return json.dumps(values, indent=2) + "\n"


def types(description: Description) -> str:
    """Return the declarations of model.js for this model."""
    return TYPES.replace("INPUTS", fields(description.inputs)).replace("OUTPUTS", fields(description.outputs))


def fields(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        kind = row["dtype"]
        lines.append(f"  /** {kind}{row['shape']}, row by row{BITS.get(kind, '')} */")
        lines.append(f"  {json.dumps(row['name'])}: {ARRAYS[kind]};")
    return "\n".join(lines)


TYPES = """\
/** The inputs of a run. */
export interface Inputs {
INPUTS
}

/** The results of a run: new arrays. */
export interface Outputs {
OUTPUTS
}

export interface Spec {
  name: string;
  dtype: string;
  shape: number[];
  size: number;
}

export interface Model {
  /** What runs the model. */
  readonly device: 'webgpu' | 'wasm';
  /** Why WebGPU is not used; empty if it is, or if 'wasm' was requested. */
  readonly reason: string;
  readonly inputs: Spec[];
  readonly outputs: Spec[];
  /** Runs the model; runs that overlap wait for each other. Rejects with TypeError for wrong inputs. */
  run(inputs: Inputs): Promise<Outputs>;
  /** Resets the state that runs carry over. */
  reset(): Promise<void>;
  /** Releases the memory of the GPU. */
  close(): Promise<void>;
}

/** Loads the model: on WebGPU or, without it, as WebAssembly. `base` is the address of a file next to model.json. */
export function load(options?: { device?: 'webgpu' | 'wasm'; base?: string | URL }): Promise<Model>;
"""


def readme(name: str, description: Description) -> str:
    arguments = ", ".join(f"{json.dumps(r['name'])}: new {ARRAYS[r['dtype']]}({r['size']})" for r in description.inputs)
    result = description.outputs[0]["name"] if description.outputs else ""
    return README.replace("NAME", name).replace("GIVEN", arguments).replace("RESULT", json.dumps(result))


README = """\
# NAME

A model compiled by mithril for browsers and Node.js.

```js
import { load } from './model.js';

const model = await load();
const results = await model.run({ GIVEN });
console.log(model.device, results[RESULT]);
```

`load` uses WebGPU and, where a browser has none, WebAssembly: `model.device` says which, `model.reason` why.
`python -m http.server` in this folder serves `index.html`, which compares both with the results of Python.
A web application publishes the folder among its static files; `load({ base })` takes its address.

| file | contents |
|---|---|
| `model.js`, `model.d.ts` | the module and its types |
| `model.json`, `model.wgsl` | the steps and the kernels of WebGPU |
| `model.weights` | the weights, each at a multiple of 64 bytes, little-endian |
| `model.wasm` | the model as WebAssembly with SIMD |
| `model.check`, `index.html` | inputs with their results, and the page that checks them |
"""
