"""Generation by layers of one's own: the tokens equal those of reading the whole text again without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import (
    GRU,
    LSTM,
    Embedding,
    Layer,
    LayerNorm,
    Linear,
    MixtureOfExperts,
    PositionalEmbedding,
    RMSNorm,
    RotaryEmbedding,
    TransformerEncoder,
)

BACKENDS = ["numpy", "jax", "torch", "mlx", "c", "ggml"]
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
WORDS, WIDTH, CONTEXT, COUNT = 20, 16, 24, 4


class Attention(Layer):
    """Causal attention with grouped keys, a window, rotary positions or ALiBi, or learned keys before the text."""

    def __init__(self, groups: int = 2, window: int | None = None, kind: str = "") -> None:
        self.groups, self.window, self.kind = groups, window, kind
        self.query, self.key, self.value = Linear(WIDTH), Linear(groups * 4), Linear(groups * 4)
        self.rotary, self.output = RotaryEmbedding(), Linear(WIDTH)

    def build(self, x: Any) -> Any:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        if self.kind == "rotary":
            q, k = (self.rotary(part, self.first_position(x)) for part in (q, k))
        k, v, mask = self.cache(k, v, length=CONTEXT, window=self.window)
        if self.kind == "alibi":
            slopes = np.float32([2.0**-n for n in range(1, 5)]).reshape(4, 1, 1)
            columns = ops.iota(shape=(1, k.shape[2]), axis=1, dtype="float32")
            mask = ops.where(mask, columns * slopes, float("-inf"))
        if self.kind == "prefix":
            prefixes = [self.param(name, (1, self.groups, 3, 4), "normal") for name in ("keys", "values")]
            k, v = (
                ops.concat(ops.broadcast_to(p, shape=(x.shape[0], *p.shape[1:])), part, axis=2)
                for p, part in zip(prefixes, (k, v), strict=True)
            )
            mask = ops.pad(mask, widths=(*[(0, 0)] * (len(mask.shape) - 1), (3, 0)), value=True)
        y = ops.attention(q, k, v, mask)
        return self.output(ops.reshape(ops.transpose(y, perm=(0, 2, 1, 3)), shape=(*x.shape[:2], WIDTH)))

    @staticmethod
    def split(x: Any) -> Any:
        return ops.transpose(ops.reshape(x, shape=(*x.shape[:2], x.shape[2] // 4, 4)), perm=(0, 2, 1, 3))


class Recurrent(Layer):
    """An LSTM or a GRU whose states continue."""

    def __init__(self, kind: str) -> None:
        self.part = LSTM(WIDTH) if kind == "lstm" else GRU(WIDTH)

    def build(self, x: Any) -> Any:
        names = self.part.states
        if self.training:
            return self.part(x)[0]
        states = {name: self.state(name, (1, x.shape[0], WIDTH)) for name in names}
        y, *last = self.part(x, lengths=self.token_counts(x), **states)
        for name, value in zip(names, last, strict=True):
            self.update_state(name, value)
        return y


class Block(Layer):
    def __init__(self, mixer: Layer, mlp: Layer | None = None, parallel: bool = False) -> None:
        self.norm, self.second, self.mixer = RMSNorm(), LayerNorm(), mixer
        self.mlp, self.parallel = mlp or Linear(WIDTH), parallel

    def build(self, x: Any) -> Any:
        y = self.norm(x)
        if self.parallel:
            return x + self.mixer(y) + self.mlp(y)
        x = x + self.mixer(y)
        return x + self.mlp(self.second(x))


class Text(Layer):
    inputs: tuple[str, ...] = ("tokens",)
    outputs = ("scores",)

    def __init__(self, *blocks: Layer, repeats: int = 1, positions: bool = True) -> None:
        self.embedding, self.blocks, self.repeats = Embedding(WORDS, WIDTH, init="normal"), list(blocks), repeats
        self.places = PositionalEmbedding(CONTEXT, init="normal") if positions else None
        self.head = Linear(WORDS)

    def expects(self, terminal: str) -> Any:
        return (None, None), "int32"

    def build(self, tokens: Any, memory: Any = None) -> Any:
        x = self.embedding(tokens)
        if self.places is not None:
            x = self.places(x, self.first_position(tokens))
        for block in self.blocks * self.repeats:
            x = block(x) if memory is None else block(x, memory)
        return self.head(x)


class Translation(Text):
    inputs = ("tokens", "memory")

    def expects(self, terminal: str) -> Any:
        return ((None, None), "int32") if terminal == "tokens" else ((None, None, WIDTH), "float32")


class Crossed(Layer):
    """Attention over the text, then over the result of an encoder."""

    inputs = ("input", "memory")

    def __init__(self) -> None:
        self.block, self.keys = Block(Attention()), Linear(WIDTH)

    def build(self, x: Any, memory: Any) -> Any:
        x = self.block(x)
        q, k, v = (ops.reshape(a, shape=(x.shape[0], 1, a.shape[1], WIDTH)) for a in (x, self.keys(memory), memory))
        return x + ops.reshape(ops.attention(q, k, v), shape=x.shape)


class Library(Layer):
    def __init__(self) -> None:
        self.stack = TransformerEncoder(2, WIDTH, heads=2, kv_heads=1, rotary=True, cache=CONTEXT, dropout=0.0)

    def build(self, x: Any) -> Any:
        return self.stack(x)


MODELS = {
    "positions": lambda: Text(Block(Attention(4)), Block(Attention(4))),
    "grouped keys": lambda: Text(Block(Attention(1)), Block(Attention(2))),
    "window": lambda: Text(Block(Attention(window=3)), Block(Attention())),
    "alibi": lambda: Text(Block(Attention(kind="alibi")), positions=False),
    "rotary": lambda: Text(Block(Attention(kind="rotary")), positions=False),
    "prefix": lambda: Text(Block(Attention(kind="prefix"))),
    "lstm": lambda: Text(Block(Recurrent("lstm")), positions=False),
    "hybrid": lambda: Text(Block(Recurrent("gru")), Block(Attention())),
    "experts": lambda: Text(Block(Attention(), MixtureOfExperts(4, 8, active=2))),
    "encoder-decoder": lambda: Translation(Crossed()),
    "shared layers": lambda: Text(Block(Attention()), repeats=3),
    "parallel": lambda: Text(Block(Attention(), parallel=True)),
    "library layers": lambda: Text(Library(), positions=False),
}
MEMORY = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)


def compiled(name: str, backend: str, *, inference: bool = True) -> Any:
    shapes = {"tokens": [None, None], **({"memory": [None, None, WIDTH]} if name == "encoder-decoder" else {})}
    return ml.compile(MODELS[name](), backend, shapes=shapes, inference=inference)


def recomputed(name: str, params: Any, row: int) -> list[int]:
    """Read the whole text for each token, by the graph for training, which has no cache."""
    model, text = compiled(name, "numpy", inference=False), list(PROMPTS[row])
    for _ in range(COUNT):
        inputs = {"tokens": np.array([text], np.int32), **source(name, [row])}
        scores, _ = model.evaluate(params, inputs, state={}, training=True)
        text.append(int(scores["scores"][0, -1].argmax()))
    return text[len(PROMPTS[row]) :]


def source(name: str, rows: list[int]) -> dict[str, Any]:
    return {"memory": MEMORY[rows]} if name == "encoder-decoder" else {}


ELSEWHERE = ("hybrid", "encoder-decoder")  # the models that test other backends in every run
CASES = [
    pytest.param(name, backend, marks=[] if backend == "numpy" or name in ELSEWHERE else pytest.mark.soak)
    for name in MODELS
    for backend in BACKENDS
]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_own_models_generate(name, backend):
    pytest.importorskip({"c": "mithril_cbackend"}.get(backend, f"mithril_{backend}"))
    model = compiled(name, backend)
    params = compiled(name, "numpy").randomize_params(1)
    expected = [recomputed(name, params, row) for row in (0, 1)]
    session = ml.Session(model.runner(params))
    options = {"max_new_tokens": COUNT, "stop": ()}
    assert ml.generate(session, PROMPTS, source=source(name, [0, 1]) or None, **options) == expected
    single = source(name, [0]) or None
    assert ml.generate(session, PROMPTS[0], source=single, **options) == expected[0]
    if single is None:
        assert ml.generate(session, PROMPTS[0] + expected[0][:2], max_new_tokens=COUNT - 2) == expected[0][2:]


def test_a_backend_that_recompiles_builds_two_programs():
    """Prompts of all lengths and batches of unequal ones share a program for pieces and one for steps."""
    pytest.importorskip("mithril_jax")
    import jax

    model = compiled("positions", "jax")
    session = ml.Session(model.runner(compiled("positions", "numpy").randomize_params(1)))
    seen: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **more: (
            seen.append(str(more.get("fun_name"))) if event.endswith("backend_compile_duration") else None
        )
    )
    for prompt in ([1], [1, 2, 3], list(range(17)), [4, 5, 6, 7, 8]):
        ml.generate(session, prompt, max_new_tokens=3, stop=())
    assert len(seen) <= 2, seen


def test_models_with_a_cache_are_trained_validated_and_predict():
    trainer = ml.Trainer(MODELS["hybrid"](), ml.Adam(1e-2), loss="cross_entropy", backend="numpy", progress=False)
    x = np.arange(48, dtype=np.int32).reshape(6, 8) % WORDS
    history = trainer.fit(x, x, epochs=1, batch_size=3, validation_data=(x[:4], x[:4]))
    assert np.isfinite(history["val_loss"]).all()
    assert trainer.predict(x[:1]).shape == (1, 8, WORDS)


def test_errors_name_the_reason():
    params = compiled("lstm", "numpy").randomize_params(0)
    session = ml.Session(compiled("lstm", "numpy").runner(params))
    with pytest.raises(ml.InputError, match=r"cannot\n  recurrent states: blocks.0.mixer.hidden"):
        ml.generate(session, [1], draft=compiled("lstm", "numpy").runner(params))
    crossed = compiled("encoder-decoder", "numpy")
    crossed.bind(crossed.randomize_params(0))
    with pytest.raises(ml.InputError, match=r"source=\{'memory': array\}"):
        ml.generate(crossed, [1])
    with pytest.raises(ml.InputError, match=r"source\['memory'\] has the shape \[2, 5, 16\] for 1 prompts"):
        ml.generate(crossed, [1], source={"memory": MEMORY})
    with pytest.raises(ml.InputError, match="the cache holds 24 positions"):
        ml.generate(compiled("window", "numpy").runner(compiled("window", "numpy").randomize_params(0)), [1] * 25)


def test_states_that_read_padding_are_rejected_for_prompts_of_different_lengths():
    class Sum(Layer):
        def build(self, x: Any) -> Any:
            self.first_position(x)
            before = self.state("sum", (x.shape[0], 1, WIDTH))
            self.update_state("sum", before + ops.sum(x, axis=1, keepdims=True))
            return before + ops.cumsum(x, axis=1)

    model = ml.compile(Text(Block(Sum()), positions=False), "numpy", shapes={"tokens": [None, None]}, inference=True)
    run = model.runner(model.randomize_params(0))
    with pytest.raises(ml.InputError, match=r"token_counts\(x\)"):
        ml.generate(run, PROMPTS, max_new_tokens=COUNT)
    texts = [[3, 1, 4], [1, 5, 9]]
    together = ml.generate(run, texts, max_new_tokens=COUNT)
    assert together == [ml.generate(run, text, max_new_tokens=COUNT) for text in texts]
