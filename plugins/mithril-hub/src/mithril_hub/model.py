"""Pretrained models as layers with their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mithril import ops
from mithril.compiler import TraceRequest, source_of
from mithril.graph import InputError, TensorType, dtype as as_dtype
from mithril.models import Layer
from mithril_hub.checkpoint.stacked_experts import separated
from mithril_hub.decoder.config import DecoderConfig
from mithril_hub.decoder.decoder import Trunk, capped
from mithril_hub.decoder.places import Places, selected
from mithril_hub.parts import Projection, logits_of_table

IDS = "int64"  # of tokens and masks, as tokenizers return them and as exported files take them


class Pretrained(Layer):
    """A model of a checkpoint."""

    def example_types(self) -> Mapping[str, TensorType]:
        """Return types of inputs with which the model can be traced."""
        raise NotImplementedError


class Decoder(Pretrained):
    """A decoder language model: ``input_ids`` [batch, length] to ``logits`` [batch, length, vocabulary].

    Without ``cache``, the optional input ``attention_mask`` [batch, length] marks padding by 0. With ``cache=n``, keys
    and values of n positions are states; ``position`` is the position of the first token, [] or one per row, and the
    optional input ``last`` [batch] selects one token of each row, whose logits are [batch, 1, vocabulary]. Where rotary
    positions depend on the length of the sequence, ``length``, [] or [batch], is its number of tokens after the call.
    """

    inputs: tuple[str, ...] = ("input_ids",)
    optional: tuple[str, ...] = ("attention_mask",)
    outputs = ("logits",)

    def __init__(self, config: DecoderConfig, *, cache: int | None = None, dtype: str = "float32") -> None:
        self.config = config
        self.capacity = cache
        self.dtype = dtype
        self.trunk_name = config.names.root.rstrip(".")
        setattr(self, self.trunk_name, Trunk(config, dtype))
        if not config.tied:
            head = Projection(config.hidden, config.vocabulary, dtype, bias=config.head_bias)
            setattr(self, config.names.head, head)
        if cache:
            self.inputs, self.optional = ("input_ids", "position"), ("last",)
            if config.depends_on_length:
                self.inputs = (*self.inputs, "length")

    def checkpoint_parameters(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arrays by the names of checkpoints: the matrices of stacked experts are separate there."""
        return separated(parameters) if self.config.experts and self.config.experts.stacked else parameters

    def expects(self, terminal: str) -> Any:
        if terminal == "attention_mask":
            return (None, None), IDS
        return ((None, None), "int32" if self.capacity else IDS) if terminal == "input_ids" else None

    def example_types(self) -> Mapping[str, TensorType]:
        shapes: dict[str, Any] = {"input_ids": (1, 1), "position": (), "length": ()}
        return {name: TensorType(as_dtype("int32" if self.capacity else IDS), shapes[name]) for name in self.inputs}

    def build(self, *inputs: Any) -> Any:
        arguments = dict(zip((*self.inputs, *self.optional), inputs, strict=True))
        tokens, total = ops.cast(arguments["input_ids"], dtype="int32"), arguments.get("length")
        position, mask = arguments.get("position"), arguments.get("attention_mask")
        places = Places.of(tokens, position, self.capacity, mask, total, "Decoder")
        trunk = getattr(self, self.trunk_name)
        x = selected(trunk(tokens, places), arguments.get("last"))
        return capped(self._logits(trunk, x), self.config.logit_cap)

    def _logits(self, trunk: Any, x: Any) -> Any:
        config, names = self.config, self.config.names
        if not config.tied:
            return getattr(self, names.head)(x)
        bias = self.param(f"{names.head}.bias", (config.vocabulary,), "zeros", self.dtype) if config.head_bias else None
        return logits_of_table(x, getattr(trunk, names.embedding), config.vocabulary, self.dtype, bias)


def with_stacked_experts(model: Pretrained, *, stacked: bool = True) -> Decoder:
    """Return the decoder with one parameter for all experts, or with one for each."""
    if not isinstance(model, Decoder) or model.config.experts is None:
        raise InputError("stack_experts=True requires a mixture of experts", hint="omit stack_experts")
    experts = replace(model.config.experts, stacked=stacked)
    return Decoder(replace(model.config, experts=experts), cache=model.capacity, dtype=model.dtype)


def parameter_types(model: Pretrained) -> dict[str, TensorType]:
    """Return the parameters of a model by name, from a trace with the sizes of an example."""
    source = source_of(model, outputs=None, inference=True)
    graph = source.graph(model.example_types(), TraceRequest())
    return {i.name: i.type for i in graph.with_role("param")}
