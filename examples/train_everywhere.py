"""One model, one seed, every installed backend: the learning curves coincide.

python examples/train_everywhere.py [--steps 100] [numpy jax ...]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from train_digits import BATCH, data, perceptron

import mithril as ml
from mithril import plugins
from mithril_train.learning_curves import curves

PICTURES = Path(__file__).parent / "pictures"


def losses(backend: str, steps: int) -> list[float]:
    """Return the loss of every step, with dropout, shuffling and a schedule."""
    learn, _ = data()
    epochs = -(-steps // (len(learn[1]) // BATCH))
    trainer = ml.Trainer(
        perceptron(),
        ml.AdamW(ml.WarmUp(ml.Cosine(2e-3, steps), 10)),
        loss="cross_entropy",
        backend=backend,
        progress=False,
    )
    trainer.fit(ml.DataLoader(learn, batch_size=BATCH, shuffle=True, drop_last=True), epochs)
    return trainer.history.steps[:steps]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("backends", nargs="*", default=list(plugins.backends()))
    arguments.add_argument("--steps", type=int, default=100)
    options = arguments.parse_args()
    drawn: dict[str, list[float]] = {}
    for name in options.backends:
        start = time.perf_counter()
        try:
            drawn[name] = losses(name, options.steps)
        except ml.MithrilError as error:
            print(f"{name:8} {error.what}")
            continue
        first = next(iter(drawn.values()))
        difference = max(abs(a - b) for a, b in zip(drawn[name], first, strict=True))
        print(f"{name:8} {time.perf_counter() - start:6.1f} s  last loss {drawn[name][-1]:.6f}  apart {difference:.1e}")
    print("learning curves:", curves(PICTURES / "train_everywhere.svg", drawn, title="The same seed on every backend"))


if __name__ == "__main__":
    main()
