"""Steps of a Llama on onnxruntime for ``bench_decode.py``: grouped attention whose cache is updated in place.

The graph consists of onnxruntime's own operators: GroupQueryAttention with rotary positions, past and present keys in
one buffer, normalization by root mean squares, and products of 4-bit weights (MatMulNBits in blocks of 32, with int8
activations) if the setting is ``int4``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"


class Writer:
    """The nodes and constants of one graph."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights, self.nodes, self.constants = weights, [], {}

    def node(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, array: Any) -> str:
        self.constants[name] = numpy_helper.from_array(np.asarray(array, order="C"), name)
        return name

    def linear(self, x: str, name: str, result: str) -> str:
        return self.node("MatMul", [x, self.constant(name, self.weights[name].T)], [result])

    def norm(self, x: str, name: str, result: str) -> str:
        scale = self.constant(name, self.weights[name])
        return self.node("SimplifiedLayerNormalization", [x, scale], [result], axis=-1, epsilon=1e-6)


def llama(weights: dict[str, Any], config: dict[str, Any], cache: int) -> onnx.ModelProto:
    """Return the model: tokens and the number of positions to logits of the last one, with caches."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    size = config["hidden_size"] // heads
    w = Writer(weights)
    table = w.constant("model.embed_tokens.weight", weights["model.embed_tokens.weight"])
    x = w.node("Gather", [table, "tokens"], ["x"])
    angles = np.arange(cache)[:, None] / 10000 ** (np.arange(0, size, 2) / size)
    tables = [
        w.constant("cos", np.cos(angles).astype(np.float32)),
        w.constant("sin", np.sin(angles).astype(np.float32)),
    ]
    settings = {"num_heads": heads, "kv_num_heads": config["num_key_value_heads"], "do_rotary": 1}
    states = []
    for k in range(layers):
        name = f"model.layers.{k}"
        h = w.norm(x, f"{name}.input_layernorm.weight", f"h{k}")
        q, key, v = (w.linear(h, f"{name}.self_attn.{p}_proj.weight", f"{p}{k}") for p in "qkv")
        past = [f"past_key{k}", f"past_value{k}"]
        present = [f"present_key{k}", f"present_value{k}"]
        inputs = [q, key, v, *past, "seqlens_k", "total", *tables]
        w.node("GroupQueryAttention", inputs, [f"a{k}", *present], MICROSOFT, **settings)
        x = w.node("Add", [x, w.linear(f"a{k}", f"{name}.self_attn.o_proj.weight", f"o{k}")], [f"y{k}"])
        h = w.norm(x, f"{name}.post_attention_layernorm.weight", f"g{k}")
        gate = w.linear(h, f"{name}.mlp.gate_proj.weight", f"gate{k}")
        silu = w.node("Mul", [gate, w.node("Sigmoid", [gate], [f"sigmoid{k}"])], [f"silu{k}"])
        product = w.node("Mul", [silu, w.linear(h, f"{name}.mlp.up_proj.weight", f"up{k}")], [f"product{k}"])
        x = w.node("Add", [x, w.linear(product, f"{name}.mlp.down_proj.weight", f"down{k}")], [f"z{k}"])
        states += [*past, *present]
    x = w.norm(x, "model.norm.weight", "normed")
    x = w.node("Gather", [x, w.constant("last", np.array([-1], np.int64))], ["row"], axis=1)
    head = w.constant("head", weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T)
    w.node("MatMul", [x, head], ["logits"])
    of_cache = [1, config["num_key_value_heads"], cache, size]
    value = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, of_cache) for n in states}
    inputs = [
        helper.make_tensor_value_info("tokens", TensorProto.INT64, [1, "n"]),
        helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [1]),
        helper.make_tensor_value_info("total", TensorProto.INT32, []),
        *(value[n] for n in states if n.startswith("past")),
    ]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 1, config["vocab_size"]])
    outputs = [logits, *(value[n] for n in states if n.startswith("present"))]
    graph = helper.make_graph(w.nodes, "llama", inputs, outputs, list(w.constants.values()))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def onnxruntime_steps(
    folder: Path, config: dict[str, Any], prompt: list[int], cache: int, threads: int, kind: str = ""
) -> Iterator[int]:
    """Yield tokens of onnxruntime, in float32 or with 4-bit weights (``int4``)."""
    import onnxruntime
    from safetensors.numpy import load_file

    if kind not in ("", "int4"):
        raise ValueError(f"onnxruntime:{kind} is not an engine; use onnxruntime or onnxruntime:int4")
    model = llama(load_file(folder / "model.safetensors"), config, cache)
    if kind:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True, accuracy_level=4)
        quantizer.process()
        model = quantizer.model.model
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    size = config["hidden_size"] // config["num_attention_heads"]
    shape = (1, config["num_key_value_heads"], cache, size)
    binding, states = session.io_binding(), {}
    for k in range(config["num_hidden_layers"]):
        for part in ("key", "value"):
            states[part, k] = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
            binding.bind_ortvalue_input(f"past_{part}{k}", states[part, k])
            binding.bind_ortvalue_output(f"present_{part}{k}", states[part, k])
    tokens, position = prompt, 0
    while True:
        position += len(tokens)
        binding.bind_cpu_input("tokens", np.array([tokens], np.int64))
        binding.bind_cpu_input("seqlens_k", np.array([position - 1], np.int32))
        binding.bind_cpu_input("total", np.array(position, np.int32))
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        logits = next(v for v in binding.get_outputs() if v.shape()[-1] == config["vocab_size"])
        tokens = [int(np.argmax(logits.numpy()[0, -1]))]
        yield tokens[0]
