"""Sites: the module in Node.js, kernels within the default limits, the page in Chromium, errors of exports."""

import json
import os
import subprocess

import numpy as np
import pytest
from browsers import in_chromium, needs_chromium, needs_node, needs_zig, node

import mithril as ml
from mithril import ops
from mithril.graph import Builder, Output, result
from mithril.models import BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, MultiHeadAttention, Relu, Sequential
from mithril_webgpu.host import WebGPUHost
from mithril_webgpu.web import webassembly

no_device = pytest.mark.no_device


def bound(model, backend, **options):
    compiled = ml.compile(model, backend, inference=True, **options)
    return compiled.bind(compiled.randomize_params(seed=0))


def network():
    layers = [Conv2d(1, 6, 3, padding=1), BatchNorm2d(6), Relu(), MaxPool2d(2), Flatten(), Linear(96, 10)]
    return bound(Sequential(*layers), "webgpu" if WebGPUHost.devices() else "c", shapes={"input": [2, 1, 8, 8]})


def cached():
    """Return a model whose runs update a state and may exceed it."""
    model = ml.models.Model()
    model |= MultiHeadAttention(heads=2, cache=4, name="a")(query="query", position="position", output="output")
    return bound(model, "c", shapes={"query": [1, 1, 8], "position": []})


def control():
    """Return a graph with loops, a branch, a state, small dtypes, a long concatenation, a name with a space."""
    with Builder() as b:
        x, n, code = b.input("the x", (4,)), b.input("n", (), "int32"), b.input("code", (5,), "int8")
        w, count = b.param("w", (4, 300)), b.input("count", (), "int32", role="state")
        parts = [b.param(f"part{k}", (3,)) for k in range(12)]
        doubled, _ = ops.while_loop(lambda s: s[1] < n, lambda s: (s[0] * 2.0, s[1] + 1), (x, np.int32(0)))
        last, rows = ops.scan(lambda c, row: (c + row, c * row), x * 0.0, ops.stack(doubled, x, x, axis=0))
        y = ops.cond(ops.sum(x) > 0, lambda v: v + 1.0, lambda v: v - 1.0, last)
        outputs = {"y": y, "rows": rows, "wide": y @ w, "double": code + code, "holds": x > 0.5, "counted": count}
        outputs |= {"half": ops.cast(x, dtype="bfloat16"), "largest": ops.argmax(x, axis=0)}
        outputs["parts"] = ops.concat(*parts, axis=0)
        results = [Output(v, n) for n, v in outputs.items()] + [result("state", "count", count + 1)]
    return bound(b.build(results), "c")


BUILDS = (network, cached, control)
INPUTS = {
    "cached": {"query": np.linspace(-1, 1, 8, dtype=np.float32).reshape(1, 1, 8), "position": np.int32(0)},
    "control": {
        "the x": np.array([0.5, -1, 2, 1e-6], np.float32),
        "n": np.int32(3),
        "code": np.array([127, -128, 5, -6, 0], np.int8),
    },
}


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Export each model once, and return its folder and the compiled model."""
    exported, root = {}, tmp_path_factory.mktemp("sites")
    for build in BUILDS:
        compiled, folder = build(), root / build.__name__
        compiled.export(folder, format="web", name=build.__name__, inputs=INPUTS.get(build.__name__))
        exported[build.__name__] = folder, compiled
    return exported


SCRIPT = """
import { pathToFileURL } from 'node:url';
const { load } = await import(pathToFileURL(process.argv[2] + '/model.js'));
const model = await load(), it = JSON.parse(process.argv[3]);
const make = (inputs) => Object.fromEntries(model.inputs.map((s) => [s.name, kinds[s.dtype].from(inputs[s.name])]));
const kinds = { float32: Float32Array, int32: Int32Array, int8: Int8Array };
const results = await Promise.allSettled(it.runs.map((x) => (x === null ? model.reset() : model.run(make(x)))));
const refused = await Promise.allSettled([{}, { ...make(it.runs[0]), other: 1 }].map((x) => model.run(x)));
console.log(JSON.stringify([model.device, model.reason, results.map((r) => r.reason?.message ?? Object.fromEntries(
  Object.entries(r.value ?? {}).map(([k, x]) => [k, [...x]]))), refused.map((r) => r.reason.message)]));
"""


def in_node(folder, runs, tmp_path):
    (tmp_path / "run.mjs").write_text(SCRIPT)
    lists = [None if x is None else {n: np.ravel(a).tolist() for n, a in x.items()} for x in runs]
    command = [node(), str(tmp_path / "run.mjs"), str(folder), json.dumps(lists and {"runs": lists})]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@no_device
@needs_zig
@needs_node
def test_the_module_runs_in_node_as_webassembly(sites, tmp_path):
    folder, compiled = sites["cached"]
    run = {"query": INPUTS["cached"]["query"], "position": np.int32(0)}
    runs = [{**run, "position": np.int32(k)} for k in (0, 1, 9, 2)]
    device, reason, results, refused = in_node(folder, [*runs, None, runs[0]], tmp_path)
    assert (device, reason) == ("wasm", "WebGPU is missing here")
    runner = compiled.runner()
    expected = [np.ravel(runner(runs[k])["output"]) for k in (0, 1, 3)]
    for k, expected_output in zip((0, 1, 3), expected, strict=True):
        np.testing.assert_allclose(results[k]["output"], expected_output, rtol=1e-5, atol=1e-6)
    assert results[2].startswith("a loop reached its limit of steps, or an index is past the end of a buffer")
    assert results[5] == results[0]  # after a reset
    assert refused[0] == "input 'query' must be a Float32Array of 8 elements, float32[1,1,8]; it is missing"
    assert refused[1] == "the model has no input 'other'"


def test_kernels_compile_within_the_default_limits(sites):
    limits = {
        "max-storage-buffers-per-shader-stage": 8,
        "max-storage-buffer-binding-size": 128 << 20,
        "max-compute-invocations-per-workgroup": 256,
        "max-compute-workgroup-storage-size": 16 << 10,
    }
    device = WebGPUHost.devices()[0].request_device_sync(required_limits=limits)
    assert {name: device.limits[name] for name in limits} == limits
    for folder, _ in sites.values():
        description = json.loads((folder / "model.json").read_text())
        codes = (folder / "model.wgsl").read_text().split("// -- ")[1:]
        assert [c.partition("\n")[0] for c in codes] == [x["name"] for x in description["webgpu"]["launches"]]
        for launch, code in zip(description["webgpu"]["launches"], codes, strict=True):
            module = device.create_shader_module(code=f"// {code}")
            stage = {"module": module, "entry_point": launch["name"]}
            device.create_compute_pipeline(layout="auto", compute=stage)


FRAME = """<iframe id="frame"></iframe><script type="module">
const frame = document.getElementById('frame'), reports = {};
for (const name of NAMES) {
  frame.src = `${name}/index.html`;
  do {
    await new Promise((resolve) => setTimeout(resolve, 50));
    reports[name] = frame.contentDocument?.documentElement.dataset.results;
  } while (!frame.contentWindow.location.href.includes(name) || !reports[name]);
  reports[name] = JSON.parse(reports[name]);
}
fetch('/found?' + encodeURIComponent(JSON.stringify(reports)));
</script>"""


@no_device
@needs_zig
@needs_chromium
def test_pages_give_the_results_of_python_in_chromium(sites, tmp_path):
    page = FRAME.replace("NAMES", json.dumps([*sites]))
    reports = in_chromium(page, sites["network"][0].parent, tmp_path)
    for name, rows in reports.items():
        assert [row["device"] for row in rows] == ["webgpu", "wasm"]
        assert all(row["good"] is True and row["error"] <= 2e-5 for row in rows), (name, rows)


@no_device
@needs_zig
def test_the_package(sites):
    folder, _ = sites["control"]
    manifest = json.loads((folder / "package.json").read_text())
    assert manifest["name"] == "control" and manifest["exports"]["."] == {
        "types": "./model.d.ts",
        "default": "./model.js",
    }
    assert {*manifest["files"], "package.json", "README.md"} == set(os.listdir(folder))
    types = (folder / "model.d.ts").read_text()
    assert '  /** float32[4], row by row */\n  "the x": Float32Array;' in types
    assert '  /** bfloat16[4], row by row, as bits */\n  "half": Uint16Array;' in types
    assert len((folder / "model.js").read_text().splitlines()) <= 150
    description = json.loads((folder / "model.json").read_text())
    assert all(x["offset"] % 64 == 0 for x in description["webgpu"]["stored"])
    embedded = bound(Sequential(Linear(64, 64)), "c", shapes={"input": [1, 64]}, static_inference=True)
    sizes = embedded.export(folder, format="web", webassembly=False).sizes
    assert 64 * 64 * 4 < sizes["model.weights"] < 64 * 64 * 4 + 1000  # one copy
    assert "model.wasm" not in json.loads((folder / "package.json").read_text())["files"]


def square(dtype, shape, function):
    with Builder() as b:
        y = function(b.input("x", shape, dtype))
    return ml.compile(b.build({"y": y}), "c")


@no_device
def test_errors_name_the_operation_and_the_remedy(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    with pytest.raises(ml.DTypeError, match="does not support float64") as error:
        square("float32", (2, 2), lambda x: ops.cast(x, dtype="float64")).export(folder, format="web")
    assert "= cast" in str(error.value) and "convert the inputs and constants" in str(error.value)
    with pytest.raises(ml.DTypeError, match="does not support int64"):
        square("int64", (2, 2), lambda x: x + x).export(folder, format="web")
    with pytest.raises(ml.UnsupportedError, match="cannot export to the web: 'cholesky' runs as a Python fun") as error:
        square("float32", (2, 2), ops.cholesky).export(folder, format="web")
    assert "pass it as an input, or compose it of other operations" in str(error.value)
    with pytest.raises(ml.UnsupportedError, match="'input' has an open size"):
        bound(Sequential(Linear(2, 3)), "c", shapes={"input": [None, 2]}).export(folder, format="web")
    with pytest.raises(ml.MemoryLimitError, match=r"an array takes 140 MB(?s:.*)bind arrays of at most 134"):
        square("float32", (35_000_000,), lambda x: x + 1.0).export(folder, format="web")
    with pytest.raises(ml.InputError, match="not a valid name of a package of npm"):
        network().export(folder, format="web", name="My model")
    half = square("float32", (2, 2), lambda x: ops.cast(x, dtype="float16"))
    with pytest.raises(ml.UnsupportedError, match="WebAssembly has no float16, the dtype of %cast = cast") as error:
        half.export(folder, format="web")
    assert "webassembly=False" in str(error.value)
    compiled = ml.compile(Sequential(Linear(2, 3)), "c", shapes={"input": [1, 2]}, inference=True)
    with pytest.raises(ml.InputError, match="weights are missing"):
        compiled.export(folder, format="web")
    monkeypatch.setattr(webassembly, "ZIG", webassembly.toolchains.Toolchain((), "", ""))
    with pytest.raises(ml.BackendError, match="no compiler for WebAssembly is installed") as error:
        square("float32", (2, 2), ops.tanh).export(folder, format="web")
    assert "pip install ziglang" in str(error.value) and "webassembly=False" in str(error.value)
    assert not folder.exists()
    half.export(folder, format="web", webassembly=False)


@no_device
def test_folders_of_the_c_backend_stay_c(tmp_path):
    square("float32", (2,), ops.tanh).export(tmp_path / "folder")
    assert (tmp_path / "folder" / "model.c").exists()
