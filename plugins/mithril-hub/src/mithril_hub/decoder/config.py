"""The configuration of a decoder: all that decides its graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from mithril_hub.decoder.rope import Rope


def last_name(path: str) -> str:
    """Return the name of a layer within the layer around it."""
    return path.rpartition(".")[2]


@dataclass(frozen=True)
class Names:
    """Names of the parameters in a checkpoint, without ``.weight`` and ``.bias``; ``{}`` is the number of the layer."""

    root: str = "model."
    embedding: str = "embed_tokens"
    positions: str = ""  # of learned positions
    layer: str = "layers.{}."
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    joint: str = ""  # query, key and value in one product
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    before_attention: str = "input_layernorm"
    after_attention: str = ""  # norm of the result of attention
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""  # gate and up in one product
    down: str = "mlp.down_proj"
    final_norm: str = "norm"
    head: str = "lm_head"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token passes through the ``active`` experts of the largest router weight."""

    count: int
    active: int
    size: int  # intermediate features of an expert
    normalized: bool  # whether the weights of the active experts sum to 1
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: int = 0  # intermediate features of an expert that every token passes through
    stacked: bool = False  # whether a weight [experts, in, out] holds those of all experts

    @property
    def joint(self) -> str:
        """The path of the weights of all experts, in which their number is missing."""
        return self.expert.replace("{}.", "")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder language model. One function builds all families from it."""

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    longest: int  # positions that the model was trained for
    eps: float
    activation: str = "silu"
    gated: bool = True
    norm: str = "rms"  # or "layer", with a bias
    norm_offset: float = 0.0  # added to the weight of norms: 1 in Gemma
    query_key_norm: bool = False
    parallel: bool = False  # attention and MLP read the same norm
    query_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    input_major: bool = False  # weights are [in, out]
    tied: bool = False
    ropes: tuple[Rope | None, ...] = ()  # by layer
    windows: tuple[int | None, ...] = ()  # by layer
    learned_positions: int = 0
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    experts: Experts | None = None
    sparse: tuple[bool, ...] = ()  # by layer: whether the MLP is a mixture of experts
    stop: tuple[int, ...] = ()  # tokens that end a text
    names: Names = field(default_factory=Names)

    @property
    def depends_on_length(self) -> bool:
        """Whether rotary positions depend on the length of the sequence."""
        return any(rope is not None and rope.depends_on_length for rope in self.ropes)

    @property
    def short_limit(self) -> int:
        """Tokens up to which another rotation applies, or 0: longer sequences are read again."""
        return max((rope.limit for rope in self.ropes if rope is not None and rope.long), default=0)

    @property
    def growing_limit(self) -> int:
        """Tokens beyond which each further one changes the rotation, or 0."""
        return max((rope.limit for rope in self.ropes if rope is not None and rope.growth), default=0)
