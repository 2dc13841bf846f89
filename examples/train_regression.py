"""A small regression trained in C: the whole step, forward, backward and update, is one compiled C function.

python examples/train_regression.py [--backend c] [--epochs 200]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import mithril as ml
from mithril.models import MLP, R2Score
from mithril_train.learning_curves import curves

PICTURES = Path(__file__).parent / "pictures"


def data(count: int) -> tuple[Any, Any]:
    """Points of a bent surface, with a little noise."""
    draw = np.random.default_rng(count)
    x = draw.uniform(-1, 1, (count, 2)).astype(np.float32)
    y = np.sin(3 * x[:, :1]) * np.cos(2 * x[:, 1:]) + 0.02 * draw.normal(size=(count, 1))
    return x, y.astype(np.float32)


def train(backend: str, epochs: int, progress: bool | None = None) -> ml.Trainer:
    trainer = ml.Trainer(
        MLP([32, 32, 1], activation="tanh"),
        ml.Adam(ml.Cosine(1e-2, epochs * 8)),
        loss="mse_loss",
        metrics=[R2Score()],
        backend=backend,
        progress=progress,
    )
    trainer.fit(ml.DataLoader(data(512), batch_size=64, shuffle=True), epochs, validation=data(256))
    return trainer


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="c")
    arguments.add_argument("--epochs", type=int, default=200)
    options = arguments.parse_args()
    trainer = train(options.backend, options.epochs)
    history = trainer.history
    drawn = {"learning": history["loss"], "test": history["val_loss"]}
    picture = curves(
        PICTURES / "train_regression.svg",
        drawn,
        title=f"Regression on {options.backend}",
        x="epoch",
        y="squared error",
        log=True,
    )
    print(f"R squared on points never seen: {history['val_r2_score'][-1]:.4f}")
    print(trainer.summary())
    print(f"learning curves: {picture}")


if __name__ == "__main__":
    main()
