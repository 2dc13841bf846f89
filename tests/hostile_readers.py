"""Read hostile files of every format under a watch; run by test_hostile_files.py in a process of its own."""

from __future__ import annotations

import io
import json
import platform
import resource
import struct
import sys
from pathlib import Path

import numpy as np

import mithril as ml
from mithril.models import Linear, Model
from mithril_testing import hostile_files as hostile
from mithril_testing.hostile_files import DEEP, MARK, POLYNOMIAL, Watch

MEMORY = 1 << 30  # bytes that reading may add


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def readers(root: Path):
    """Yield the name of a file, and a function that reads it."""
    compiled = ml.compile(Linear(4), "numpy", shapes={"input": [2, 3]})
    compiled.bind(compiled.randomize_params(seed=0))
    (root / "outside").mkdir()
    (root / "outside" / "secret").write_bytes(bytes(12))

    def file(name: str, content: bytes | str) -> Path:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return path

    graph = "graph g {{\n input %x: f32[{}]\n return o=%x\n}}\n"
    for content in (graph.format(POLYNOMIAL), graph.format("max(" * 5000), graph.format(f"__import__('{MARK}')"), DEEP):
        yield f"graph {content[:40]}", lambda c=content: ml.parse(c)
    for size in (POLYNOMIAL, f"__import__('{MARK}')", "max(" * 200 + "a" + ",a)" * 200):
        data = Linear(4).to_dict()
        next(e for e in data["layers"] if e["class"] == "Linear")["arguments"] = [{"size": size, "limits": {}}]
        yield f"json {size[:30]}", lambda d=data: Model.from_json(json.dumps(d))
    for name in (f"{MARK}:run", "os:system", "subprocess:Popen"):
        data = Linear(4).to_dict()
        data["layers"][0]["class"] = name
        yield f"json class {name}", lambda d=data: Model.from_json(json.dumps(d))
    yield "json deep", lambda: Model.from_json(DEEP)

    for k, header in enumerate(
        [DEEP, [1], {"w": {"dtype": "F32", "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}}, {"w": 5}]
    ):
        path = file(f"w{k}.safetensors", hostile.safetensors(header))
        yield path.name, lambda p=path: ml.open_weights(p)
        yield f"load {path.name}", lambda p=path: compiled.load(p)

    for name, content in hostile.pickles().items():
        folder = hostile.checkpoint(root / f"ck-{name}", library="dcp-x")
        file(f"ck-{name}/dcp-x/.metadata", content)
        yield f"dcp {name}", lambda f=folder: ml.load_sharded(f, compiled)
        yield f"import dcp {name}", lambda f=folder, n=name: ml.import_checkpoint(f / "dcp-x", root / f"new-{n}")
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        hostile.zipped(root / f"{name}.npz", {"w.npy": header.getvalue() + content})
        yield f"npz {name}", lambda n=name: ml.open_weights(root / f"{n}.npz")
        from mithril_hub.cli.convert import unpickle

        path = file(f"{name}.bin", content)
        hostile.zipped(root / f"{name}.pt", {"a/data.pkl": content, "a/version": b"3"})
        for source in (path, root / f"{name}.pt"):
            yield f"torch {source.name}", lambda s=source: unpickle(s, root / "out.safetensors")
    for name in ("../outside/secret", "dcp-/../../outside", "/etc/passwd"):
        folder = hostile.checkpoint(root / f"ck-name-{len(name)}", parts={name: 0})
        yield f"sharded {name}", lambda f=folder: ml.load_sharded(f, compiled)
    entry = {"w": {"shape": [10**11], "dtype": "float64", "parts": [[[0], [10**11], 0, 0]]}}
    header_text = json.dumps({"__metadata__": {"index": json.dumps(entry)}}).encode()
    folder = hostile.checkpoint(root / "ck-large", headers={"part-0": header_text})
    yield "sharded large", lambda: ml.load_sharded(folder, compiled)
    for k, key in enumerate(("../../outside/secret", "/etc/passwd", "w")):
        tree = {"tree_metadata": {"a": {"key_metadata": [{"key": key}], "value_metadata": {"skip_deserialize": False}}}}
        file(f"orbax{k}/_METADATA", json.dumps({**tree, "use_ocdbt": False}))
        shape = {"shape": [1 << 40], "chunks": [1], "dtype": "<f4", "zarr_format": 2, "fill_value": 0, "order": "C"}
        file(f"orbax{k}/w/.zarray", json.dumps({**shape, "filters": None, "compressor": None}))
        yield f"orbax {key}", lambda k=k: ml.import_checkpoint(root / f"orbax{k}", root / f"new-orbax{k}")

    large = struct.pack("<IIQ", 9, 0, 60 << 20) + bytes(60 << 20)
    many = struct.pack("<IIQ", 9, 8, 32) + text(b"a") * 32
    kind = text(b"tokenizer.ggml.model") + struct.pack("<I", 8) + text(b"gpt2")
    template = text(b"tokenizer.chat_template") + struct.pack("<I", 8)
    loop = text(b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    tokens = text(b"tokenizer.ggml.tokens")
    files = {
        "large": hostile.gguf(text(b"x") + large),
        "tokens": hostile.gguf(kind + tokens + many, 2),
        "template": hostile.gguf(kind + tokens + many + template + loop, 3),
        "short": b"GGUF" + bytes(24),
        "claims": hostile.gguf(text(b"x") + struct.pack("<IIQ", 9, 8, 1 << 60)),
    }
    for name, content in files.items():
        path = file(f"{name}.gguf", content)
        yield f"gguf {name}", lambda p=path: ml.open_weights(p)
        yield f"tokenizer gguf {name}", lambda p=path: ml.Tokenizer(p).chat([{"role": "user", "content": "a"}])

    (root / "linked").mkdir()
    for name in ("tokenizer.json", "config.json", "chat_template.jinja"):
        (root / "linked" / name).symlink_to(root / "outside" / "secret")
    yield "tokenizer link", lambda: ml.Tokenizer(root / "linked")
    yield "config link", lambda: ml.from_pretrained(root / "linked")
    for k, content in enumerate(
        (DEEP, json.dumps({"model_type": "llama", "auto_map": MARK}), "[]", '{"model_type": 5}')
    ):
        file(f"hub{k}/config.json", content)
        file(f"hub{k}/modeling_{MARK}.py", f"open('{MARK}', 'w')")
        file(f"hub{k}/model.safetensors.index.json", json.dumps({"weight_map": {"w": "../outside/secret"}}))
        file(f"hub{k}/tokenizer.json", content)
        yield f"config {k}", lambda k=k: ml.from_pretrained(root / f"hub{k}")
        yield f"tokenizer {k}", lambda k=k: ml.Tokenizer(root / f"hub{k}")

    import onnx
    from onnx import helper as h

    tensor = onnx.TensorProto(name="w", data_type=1, dims=[3], data_location=1)
    (root / "onnx").mkdir()
    (root / "onnx" / "sub").symlink_to(root / "outside")
    for k, location in enumerate(("sub/secret", "../outside/secret", "/etc/passwd")):
        del tensor.external_data[:]
        tensor.external_data.add(key="location", value=location)
        x, y = h.make_tensor_value_info("x", 1, [3]), h.make_tensor_value_info("y", 1, [POLYNOMIAL])
        x.type.tensor_type.shape.dim[0].dim_param = POLYNOMIAL
        nodes = [h.make_node("Add", ["x", "w"], ["y"])]
        onnx.save(h.make_model(h.make_graph(nodes, "g", [x], [y], [tensor])), root / "onnx" / f"{k}.onnx")
        yield f"onnx {location}", lambda k=k: ml.from_onnx(root / "onnx" / f"{k}.onnx")
    for content in (b"", b"\x08\x99", b"\x3a" * 10_000):
        yield f"onnx {content[:9]!r}", lambda c=content: ml.from_onnx(c)

    sizes, root_table = struct.pack("<II", 1 << 30, 8), struct.pack("<I4sHHi", 12, b"TFL3", 4, 4, 4)
    for content in (b"", b"TFL3" * 5, root_table, struct.pack("<I4s", 8, b"TFL3") + sizes * 5_000):
        path = file("m.tflite", content)
        yield f"tflite {content[:20]!r}", lambda p=path, c=content: (p.write_bytes(c), ml.from_tflite(p))

    hostile.zipped(root / "a.keras", {"config.json": DEEP.encode(), "model.weights.h5": b"", "metadata.json": b"{}"})
    hostile.zipped(root / "b.keras", {"config.json": b"{}", "model.weights.h5": bytes(200 << 20)})
    lambda_layer = {"class_name": "Lambda", "module": MARK, "config": {"function": f"open('{MARK}', 'w')"}}
    hostile.zipped(root / "c.keras", {"config.json": json.dumps(lambda_layer).encode(), "model.weights.h5": b""})
    for name in "abc":
        yield f"keras {name}", lambda n=name: ml.from_keras(root / f"{n}.keras")
    for content in (b"", b"ML\xefR" + bytes(100), f"module {{ {MARK} }}".encode(), b"(" * 50_000, b"=" * 200_000):
        path = file("m.stablehlo", content)
        yield f"stablehlo {content[:9]!r}", lambda p=path, c=content: (p.write_bytes(c), ml.load(p, backend="jax"))


def main() -> None:
    import torch.distributed.checkpoint  # noqa: F401

    from mithril_jax.importing import stablehlo  # noqa: F401  # libraries are imported before the watch

    platform.processor()  # starts a program once

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 3 * MEMORY,) * 2)
    watch = Watch()
    for name, read in readers(Path(sys.argv[1])):
        if problem := watch.outcome(read):
            print(f"PROBLEM {name!r:.80}: {problem}", flush=True)
        else:
            print(f"fine {name!r:.80}", flush=True)
    print("complete")


main()
