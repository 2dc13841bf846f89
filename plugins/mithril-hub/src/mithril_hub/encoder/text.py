"""Encoders of text: BERT, RoBERTa, MiniLM, DistilBERT, with a classifier if the checkpoint has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mithril import ops
from mithril_hub.encoder.blocks import BlockNames, Tower, encode, padding_mask
from mithril_hub.encoder.network import Network
from mithril_hub.model import IDS, Pretrained
from mithril_hub.weights import Weights

BERT = BlockNames(
    layer="encoder.layer.{}.",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
DISTILBERT = BlockNames(
    layer="transformer.layer.{}.",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)


@dataclass(frozen=True)
class TextConfig:
    """An encoder of text."""

    family: str
    vocabulary: int
    positions: int
    types: int  # kinds of segments; 0 without
    padding: int | None  # token whose positions do not count, as in RoBERTa
    classes: int  # of a classifier; 0 without
    pooler: bool
    tower: Tower
    pooling: str = ""  # how "embedding" follows from the hidden states: "mean" of the tokens, or the first ("cls")

    @property
    def longest(self) -> int:
        """The largest number of tokens of a text: positions of RoBERTa begin after that of the padding."""
        return self.positions - (0 if self.padding is None else self.padding + 1)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        if self.classes:
            return ("logits",)
        further = {"pooler_output": self.pooler, "embedding": bool(self.pooling)}
        return ("last_hidden_state", *(name for name, exists in further.items() if exists))


class TextEncoder(Network):
    """An encoder of text: ``input_ids`` [batch, length] to hidden states, an embedding, or logits of a classifier."""

    def __init__(self, config: TextConfig, dtype: str = "float32") -> None:
        optional = ("attention_mask", "token_type_ids") if config.types else ("attention_mask",)
        super().__init__(config, {"input_ids": ((None, None), IDS)}, config.outputs, optional, dtype)

    def compute(self, inputs: Mapping[str, Any]) -> Any:
        return text(self, self.config, inputs, self.dtype)


def text_network(settings: Mapping[str, Any], dtype: str) -> TextEncoder:
    """Return the encoder of a ``config.json``."""
    kind = settings["model_type"]
    distilled = kind == "distilbert"
    names = ("dim", "hidden_dim", "n_layers", "n_heads", "activation") if distilled else (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    )  # fmt: skip
    hidden, intermediate, layers, heads, activation = (settings[name] for name in names)
    tower = Tower(
        layers,
        heads,
        hidden,
        intermediate,
        1e-12 if distilled else float(settings.get("layer_norm_eps", 1e-12)),
        activation,
        DISTILBERT if distilled else BERT,
        pre_norm=False,
    )
    heads_of_tasks = [a for a in settings.get("architectures") or () if a.endswith("ForSequenceClassification")]
    classes = len(settings.get("id2label") or "01") if heads_of_tasks else 0
    config = TextConfig(
        kind,
        settings["vocab_size"],
        settings["max_position_embeddings"],
        0 if distilled else settings.get("type_vocab_size", 2),
        settings.get("pad_token_id", 1) if kind in ("roberta", "xlm-roberta", "camembert") else None,
        classes,
        pooler=kind == "bert" or (not classes and not distilled),
        tower=tower,
    )
    return TextEncoder(config, dtype)


def with_pooling(model: Pretrained, pooling: str) -> Pretrained:
    """Return an encoder of text with the output ``embedding``, and any other model unchanged."""
    if not isinstance(model, TextEncoder):
        return model
    if model.config.classes or pooling not in ("mean", "cls"):
        return model
    return TextEncoder(replace(model.config, pooling=pooling), model.dtype)


def text(layer: Any, config: TextConfig, inputs: Mapping[str, Any], dtype: str) -> Any:
    """Return hidden states, the pooled one and the embedding of each text, or the logits of a classifier."""
    tower, tokens = config.tower, inputs["input_ids"]
    root = {"bert": "bert.", "distilbert": "distilbert."}.get(config.family, "roberta.") if config.classes else ""
    weights = Weights(layer, dtype, root, tower)
    x = _embedded(weights, config, tokens, inputs.get("token_type_ids"))
    x = encode(weights, tower, x, padding_mask(inputs["attention_mask"]))
    first = x[:, 0]
    pooled = None
    if config.pooler:
        pooled = ops.tanh(weights.linear("pooler.dense", first, tower.hidden, bias=True))
    if not config.classes:
        embedding = pooled_embedding(config.pooling, x, inputs["attention_mask"]) if config.pooling else None
        values = tuple(value for value in (x, pooled, embedding) if value is not None)
        return values if len(values) > 1 else x
    outer = Weights(layer, dtype, "", tower)
    if config.family == "distilbert":
        first = ops.relu(outer.linear("pre_classifier", first, tower.hidden, bias=True))
    elif pooled is None:
        first = ops.tanh(outer.linear("classifier.dense", first, tower.hidden, bias=True))
        return outer.linear("classifier.out_proj", first, config.classes, bias=True)
    return outer.linear("classifier", first if pooled is None else pooled, config.classes, bias=True)


def pooled_embedding(pooling: str, x: Any, mask: Any) -> Any:
    """Return one vector for each text: that of the first token, or the mean of those that are not padding."""
    if pooling == "cls":
        return x[:, 0]
    if mask is None:
        return ops.mean(x, axis=1)
    counted = ops.cast(ops.reshape(ops.not_equal(mask, 0), shape=(*mask.shape, 1)), dtype=x.dtype)
    return ops.sum(x * counted, axis=1) / ops.sum(counted, axis=1)


def _embedded(weights: Weights, config: TextConfig, tokens: Any, segments: Any) -> Any:
    hidden, below = config.tower.hidden, weights.below("embeddings.")
    x = below.table("word_embeddings", config.vocabulary, hidden)(tokens)
    if config.types:
        first = ops.full(shape=(1, 1), value=0, dtype="int32")
        x = x + below.table("token_type_embeddings", config.types, hidden)(first if segments is None else segments)
    if config.padding is None:
        rows = ops.iota(shape=(tokens.shape[1],), axis=0, dtype="int32")
    else:
        real = ops.cast(ops.not_equal(tokens, config.padding), dtype="int32")
        rows = ops.cast(ops.cumsum(real, axis=1), dtype="int32") * real + config.padding
    return below.norm("LayerNorm", x + below.table("position_embeddings", config.positions, hidden)(rows))
