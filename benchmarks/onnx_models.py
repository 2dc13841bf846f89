"""ONNX files of well-known networks with random weights, for ``bench_onnx.py``.

``python benchmarks/onnx_models.py FOLDER [NAME...]`` writes them by torch's exporter, which needs torchvision and
transformers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_import_torch import tolerate_missing_kernels

tolerate_missing_kernels()
import torchvision  # noqa: E402
import transformers  # noqa: E402

Network = tuple[torch.nn.Module, dict[str, torch.Tensor], dict[str, Any] | None]


def _vision(name: str) -> Network:
    network = torchvision.models.get_model(name, weights=None)
    return randomize(network), {"input": torch.randn(1, 3, 224, 224)}, None


def _sizes(*names: str) -> dict[str, Any]:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=512)
    return {name: {0: batch, 1: length} for name in names}


class Logits(torch.nn.Module):
    """A network of transformers that returns its first output."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.network(input_ids=input_ids, attention_mask=attention_mask)[0]
        return out


def _text(network: torch.nn.Module) -> Network:
    inputs = {"input_ids": torch.randint(0, 100, (2, 16)), "attention_mask": torch.ones(2, 16, dtype=torch.int64)}
    return randomize(Logits(network)), inputs, _sizes(*inputs)


def minilm() -> Network:
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    return _text(transformers.BertModel(config, add_pooling_layer=False))


def llama() -> Network:
    """Return a Llama of 111 million parameters: 8 layers of 1024, 16 heads and 8 of keys."""
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return _text(transformers.LlamaForCausalLM(config))


NETWORKS: dict[str, Callable[[], Network]] = {
    "resnet50": lambda: _vision("resnet50"),
    "mobilenet_v2": lambda: _vision("mobilenet_v2"),
    "mobilenet_v3_large": lambda: _vision("mobilenet_v3_large"),
    "minilm": minilm,
    "llama": llama,
}


def randomize(network: torch.nn.Module) -> torch.nn.Module:
    """Return the network with random statistics of batch norms, and random numbers for parameters that are 0."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if name.endswith("running_var"):
            tensor.data.uniform_(0.5, 1.5, generator=generator)
        elif tensor.is_floating_point() and not tensor.any():
            tensor.data.normal_(0, 0.05, generator=generator)
    return network.eval()


def export(name: str, folder: Path, dynamo: bool = True) -> Path:
    """Write a network as an ONNX file, by torch's exporter of graphs or by its older one of traces."""
    torch.manual_seed(0)
    network, inputs, sizes = NETWORKS[name]()
    path = folder / f"{name}.onnx"
    options: dict[str, Any] = {"dynamic_shapes": sizes, "verbose": False} if dynamo else {}
    if not dynamo and sizes is not None:
        options["dynamic_axes"] = {n: {0: "batch", 1: "length"} for n in sizes}
    torch.onnx.export(
        network,
        tuple(inputs.values()),
        str(path),
        input_names=list(inputs),
        dynamo=dynamo,
        external_data=False,
        **options,
    )
    return path


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or NETWORKS:
        print(export(name, folder))
