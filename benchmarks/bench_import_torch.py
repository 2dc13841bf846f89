"""Imports public networks by ``ml.from_torch`` and compares their results with PyTorch's.

``python benchmarks/bench_import_torch.py [WORD...]``: networks of torchvision, timm and transformers whose names
contain a word, with random weights; the largest difference relative to the largest result, and the seconds of import
and compilation.
Parameters that are initialized to zero get random values first: otherwise the results of some networks are 0.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import mithril as ml

Case = tuple[str, Callable[[], nn.Module], tuple[Any, ...], Mapping[str, Any]]
LIMIT = 1e-5
VISION = {
    **dict.fromkeys(("alexnet", "resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0"), 64),
    **dict.fromkeys(("densenet121", "squeezenet1_1", "shufflenet_v2_x0_5", "regnet_y_400mf", "convnext_tiny"), 64),
    **dict.fromkeys(("swin_t", "mnasnet0_5"), 64),
    **dict.fromkeys(("vgg11_bn", "wide_resnet50_2"), 32),
    "vit_b_16": 224,
}
TIMM = {
    **dict.fromkeys(("resnet26d", "mobilenetv3_small_050", "convnext_atto", "efficientnet_lite0", "ghostnet_100"), 64),
    **dict.fromkeys(("vit_tiny_patch16_224", "mixer_s32_224", "swin_tiny_patch4_window7_224", "resmlp_12_224"), 224),
    "poolformer_s12": 64,
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(48, 10)
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.lstm(self.embedding(tokens))[0]))


def tolerate_missing_kernels() -> None:
    """Let torchvision be imported where its compiled operators do not match PyTorch's build; no network uses them."""
    register = torch.library.register_fake

    def register_fake(name: Any, *args: Any, **kwargs: Any) -> Any:
        return (lambda f: f) if str(name).startswith("torchvision::") else register(name, *args, **kwargs)

    torch.library.register_fake = register_fake


def images() -> Iterator[Case]:
    import timm
    import torchvision

    for name, size in VISION.items():
        make = getattr(torchvision.models, name)
        yield f"torchvision/{name}", lambda make=make: make(weights=None), (torch.randn(2, 3, size, size),), {}
    for name, size in TIMM.items():
        yield f"timm/{name}", lambda name=name: timm.create_model(name), (torch.randn(1, 3, size, size),), {}


def language() -> Iterator[Case]:
    import transformers as t

    t.logging.set_verbosity_error()
    ids = torch.randint(0, 99, (2, 7))
    common = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"intermediate_size": 37, "max_position_embeddings": 64}
    decoder = {**common, "num_key_value_heads": 2, "use_cache": False}
    image = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
    image |= {"image_size": 32, "patch_size": 8}
    distil = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37}
    rows: list[tuple[str, str, dict[str, Any]]] = [
        *((name, f"{name}Model", common) for name in ("Bert", "Roberta", "MPNet")),
        *((name, f"{name}Model", {**common, "embedding_size": 16}) for name in ("Albert", "Electra")),
        ("DistilBert", "DistilBertModel", {"vocab_size": 99, **distil, "max_position_embeddings": 64}),
        ("GPT2", "GPT2LMHeadModel", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}),
        ("GPTNeoX", "GPTNeoXForCausalLM", {**common, "use_cache": False}),
        ("OPT", "OPTForCausalLM", {**common, "ffn_dim": 37, "word_embed_proj_dim": 32, "use_cache": False}),
        ("Phi", "PhiForCausalLM", {**common, "use_cache": False}),
        ("Mistral", "MistralForCausalLM", {**decoder, "sliding_window": 4}),
        *((name, f"{name}ForCausalLM", decoder) for name in ("Llama", "Qwen2")),
        *((name, f"{name}ForCausalLM", {**decoder, "head_dim": 8}) for name in ("Qwen3", "Gemma2")),
        ("ViT", "ViTModel", image),
        ("CLIPVision", "CLIPVisionModel", {**image, "projection_dim": 16}),
        ("T5", "T5Model", {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}),
    ]
    for name, model, settings in rows:
        config = getattr(t, f"{name}Config")(**settings)
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)} if "patch_size" in settings else {"input_ids": ids}
        if name == "T5":
            config.use_cache = False
            inputs["decoder_input_ids"] = ids[:, :5]
        yield f"transformers/{name}", lambda m=model, c=config: getattr(t, m)(c), (), inputs


def cases() -> Iterator[Case]:
    yield "torch/LSTM", Recurrent, (torch.randint(0, 50, (3, 6)),), {}
    transformer = nn.Transformer
    yield "torch/Transformer", lambda: transformer(32, 4, 2, 2, 64), (torch.randn(7, 2, 32), torch.randn(5, 2, 32)), {}
    yield from images()
    yield from language()


def compare(make: Callable[[], nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[float, str, Any]:
    """Return the relative difference of one network, and the seconds that importing and compiling took."""
    torch.manual_seed(0)
    module = make().eval()
    for parameter in module.parameters():
        if not parameter.detach().any():
            nn.init.normal_(parameter, std=0.05)
    start = time.perf_counter()
    model = ml.from_torch(module, dict(kwargs) or args, training=False)
    imported = time.perf_counter()
    compiled = ml.compile(model, "numpy", inference=True)
    seconds = f"import {imported - start:5.1f} s, compile {time.perf_counter() - imported:4.1f} s"
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(module(*args, **kwargs))
    inputs = zip(model.inputs, (*args, *kwargs.values()), strict=True)
    results = compiled.evaluate({name: x.numpy() for name, x in inputs})
    worst = 0.0
    for reference, result in zip([e for e in expected if e is not None], results.values(), strict=True):
        assert tuple(reference.shape) == result.shape
        assert reference.abs().max() > 0
        worst = max(worst, float(abs(reference.numpy() - result).max() / reference.abs().max()))
    return worst, seconds, compiled.graph


def main(words: list[str]) -> None:
    """Print a line per network, and the counts."""
    warnings.simplefilter("ignore")
    tolerate_missing_kernels()
    passed, total = 0, 0
    operations: Counter[str] = Counter()
    for name, make, args, kwargs in cases():
        if words and not any(word in name for word in words):
            continue
        total += 1
        try:
            difference, seconds, graph = compare(make, args, kwargs)
        except Exception as error:
            print(f"failed  {name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        operations.update(node.op.name for node in graph.nodes)
        passed += difference <= LIMIT
        print(f"{'equal ' if difference <= LIMIT else 'WRONG '}  {name:<40} {difference:.1e}  {seconds}", flush=True)
    print(f"{passed} of {total} networks within {LIMIT:g} of PyTorch, in {len(operations)} different operations")


if __name__ == "__main__":
    main(sys.argv[1:])
