"""A small language model, another model, and a server of either for the tests of serving."""

import contextlib
import gc
import threading
import time
import warnings

import uvicorn

import mithril as ml
from mithril.models import Embedding, Layer, Linear, MultiHeadAttention, PositionalEmbedding, Relu, Sequential


class Words:
    """A tokenizer of one letter for each token, with a chat template."""

    template = "{{ messages }}"

    def encode(self, text):
        return [ord(c) % 64 for c in text]

    def decode(self, tokens):
        return "".join(chr(64 + t) for t in tokens)

    def chat(self, messages):
        return self.encode("".join(m["content"] for m in messages))


class Speaker(Layer):
    """A small decoder of layers of the library."""

    inputs = ("tokens",)

    def __init__(self, words=64, width=16, context=64):
        self.embedding, self.positions = Embedding(words, width, init="normal"), PositionalEmbedding(context, "normal")
        self.attention, self.head = MultiHeadAttention(width, 2, cache=context), Linear(words)

    def expects(self, terminal):
        return (None, None), "int32"

    def build(self, tokens):
        x = self.positions(self.embedding(tokens), self.first_position(tokens))
        return self.head(x + self.attention(x))


def speaker(backend="numpy", context=64):
    compiled = ml.compile(Speaker(context=context), backend, shapes={"tokens": [None, None]}, inference=True)
    return compiled.bind(compiled.randomize_params(seed=3))


def classifier():
    model = Sequential(Linear(4, 8), Relu(), Linear(8, 3))
    compiled = ml.compile(model, "numpy", shapes={"input": [None, 4]}, inference=True)
    return compiled.bind(compiled.randomize_params(seed=0))


@contextlib.contextmanager
def running(app, **options):
    """Run a server in a thread, and yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error", http="h11", ws="none", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not shut down"
        collect()


def collect():
    """Collect the connections of a server that ended: uvicorn 0.54 closes its loop before all transports are closed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
