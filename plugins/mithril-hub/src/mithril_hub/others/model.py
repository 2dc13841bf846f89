"""A model of transformers as a layer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mithril as ml
from mithril import ops
from mithril.graph import MithrilError, TensorType, dtype as as_dtype
from mithril.models import Layer
from mithril_hub.architectures import unsupported
from mithril_hub.checkpoint.checkpoint_weights import CheckpointWeights
from mithril_hub.checkpoint.folder import pooling_of
from mithril_hub.checkpoint.safetensors_file import Stored
from mithril_hub.encoder.text import pooled_embedding
from mithril_hub.model import IDS, Pretrained
from mithril_hub.others.examples import DEFAULTS, examples

INSTALL = "pip install 'mithril-hub[transformers]'"


class ImportedNetwork(Pretrained):
    """A module of transformers, whose layers have its paths; inputs with a default may be left out."""

    def __init__(self, network: Layer, pooling: str) -> None:
        self.network = network
        self._children[network] = ""
        self.pooling = pooling if "last_hidden_state" in network.outputs else ""
        self.inputs = tuple(name for name in network.inputs if name not in DEFAULTS)
        self.optional = tuple(name for name in network.inputs if name in DEFAULTS)
        self.outputs = (*network.outputs, *(("embedding",) if self.pooling else ()))

    def expects(self, terminal: str) -> Any:
        return self.network.expects(terminal)

    def example_types(self) -> Mapping[str, TensorType]:
        expected = {name: self.expects(name) for name in self.inputs}
        return {
            name: TensorType(as_dtype(kind), tuple(n if isinstance(n, int) else 2 for n in shape))
            for name, (shape, kind) in expected.items()
        }

    def build(self, *values: Any) -> Any:
        arguments = dict(zip((*self.inputs, *self.optional), values, strict=True))
        operands = []
        for name in self.network.inputs:
            value = arguments[name]
            if value is None:
                value = ops.full(shape=arguments["input_ids"].shape, value=DEFAULTS[name], dtype=IDS)
            operands.append(value)
        results = self.network(*operands)
        if not self.pooling:
            return results
        results = results if isinstance(results, tuple) else (results,)
        hidden = results[self.network.outputs.index("last_hidden_state")]
        return (*results, pooled_embedding(self.pooling, hidden, arguments["attention_mask"]))


def imported(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Stored], dtype: str) -> ImportedNetwork:
    """Return the model of a folder whose type the installed transformers knows."""
    kind = settings["model_type"]
    lost = [name for name in ("transformers", "torch", "mithril_torch") if find_spec(name) is None]
    if lost:
        raise unsupported(kind, f"others are those of transformers; not installed: {', '.join(lost)}", INSTALL)
    from mithril_hub.others.module import is_known, module_of, version

    if not is_known(kind):
        raise unsupported(kind, f"the installed transformers, {version()}, has no such type", "install a newer one")
    import torch

    module = module_of(settings, tensors, dtype, f"'{folder}'")
    rows = examples(module)
    kinds = {name: torch.int64 if e.is_tokens else getattr(torch, dtype) for name, e in rows.items()}
    inputs = {name: torch.ones(e.shape, dtype=kinds[name]) for name, e in rows.items()}
    sizes = {name: e.names for name, e in rows.items()}
    try:
        model_of_torch = ml.from_torch(module, inputs, dynamic_shapes=sizes, training=False)
    except MithrilError as error:
        raise error.with_facts(f"imported from {type(module).__name__} of transformers {version()}") from None
    # The module, which the model that is returned has as its only layer.
    _, network = next(model_of_torch.walk())
    model = ImportedNetwork(network, pooling_of(folder))
    model.pretrained = _weights(module, tensors, dtype, folder)
    return model


def _weights(module: Any, tensors: Mapping[str, Stored], dtype: str, folder: Path) -> Mapping[str, Any]:
    """Return the weights as those of the files if each parameter is one of their tensors, else none."""
    names: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        keys = [n for n in (name, name.removeprefix(f"{module.base_model_prefix}.")) if n in tensors]
        if not keys or tensors[keys[0]].shape != tuple(parameter.shape):
            return {}
        names[name] = keys[0]
    if set(tensors) != set(names.values()):
        return {}
    weights = CheckpointWeights({name: tensors[key] for name, key in names.items()}, dtype, names)
    weights.folder = folder
    return weights
