"""A language model on LSTM layers, with torch's names for their parameters."""

from __future__ import annotations

import numpy as np
from everywhere import run_everywhere

from mithril.models import LSTM, Dropout, Embedding, IOKey, Linear, Model


def lstm_lm(vocabulary: int = 10000, features: int = 256, layers: int = 2, dropout: float = 0.2) -> Model:
    """Tokens [N, L] to logits [N, L, vocabulary], and the last states to continue from."""
    tokens = IOKey("input", shape=["N", "L"], dtype="int32")
    x = Dropout(dropout)(Embedding(vocabulary, features, name="embedding")(tokens))
    x, hidden, cell = LSTM(features, features, layers=layers, dropout=dropout, name="lstm")(x)
    logits = Linear(features, vocabulary, name="head")(Dropout(dropout)(x))
    return Model.create(inputs=tokens, outputs={"output": logits, "hidden": hidden, "cell": cell})


def main() -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, (4, 24)).astype(np.int32)
    run_everywhere(lstm_lm(1000, 128), {"input": tokens})


if __name__ == "__main__":
    main()
