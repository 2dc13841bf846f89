"""A variational autoencoder of handwritten digits: a two-part loss, a random latent layer, generated images.

python examples/train_vae.py [--backend numpy] [--epochs 60]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import mithril as ml
from mithril import ops
from mithril.models import IOKey, Layer, Linear, Model, Relu, Sigmoid
from mithril_train.data import permutation
from mithril_train.learning_curves import curves

PICTURES = Path(__file__).parent / "pictures"
LATENT = 8


class Drawn(Layer):
    """A sample of the normal distribution that mean and logarithm of the variance describe; in use, the mean."""

    inputs = ("mean", "log_variance")

    def build(self, mean: Any, log_variance: Any) -> Any:
        if not self.training:
            return mean
        noise = ops.normal(self.key(), shape=mean.shape)
        return mean + ops.exp(log_variance * 0.5) * noise


def decoder() -> Model:
    model = Model(name="decoder")
    model += Linear(LATENT, 64)(input="input")
    model += Relu()
    model += Linear(64, 64)
    model += Sigmoid()
    return model


def autoencoder() -> Model:
    """Autoencoder: pixels [N, 64] to reconstructed pixels and the latent mean and log variance."""
    x = IOKey("input")
    hidden = Relu()(Linear(64, 64, name="encoder")(x))
    mean, spread = Linear(64, LATENT, name="mean")(hidden), Linear(64, LATENT, name="log_variance")(hidden)
    again = decoder()(Drawn()(mean, spread))
    return Model.create(outputs={"again": again, "mean": mean, "log_variance": spread})


def evidence(again: Any, input: Any, mean: Any, log_variance: Any) -> Any:
    """Return the negative evidence lower bound per image; arguments are bound by name to outputs and batch."""
    return drawing(again, input) + divergence(mean, log_variance)


def drawing(again: Any, input: Any) -> Any:
    """Return the reconstruction error of the pixels."""
    return ops.binary_cross_entropy(again, input, reduction="mean", eps=1e-6) * 64.0


def divergence(mean: Any, log_variance: Any) -> Any:
    """Return the KL divergence of the latent layer from a standard normal distribution."""
    divergence = ops.exp(log_variance) + mean * mean - 1.0 - log_variance
    return ops.mean(ops.sum(divergence, axis=-1)) * 0.5


def train(backend: str, epochs: int, progress: bool | None = None) -> ml.Trainer:
    pixels = (load_digits().data / 16.0).astype(np.float32)
    pixels = pixels[permutation(len(pixels), seed=0)]
    trainer = ml.Trainer(
        autoencoder(),
        ml.Adam(3e-3),
        loss=evidence,
        metrics={"drawing": drawing, "divergence": divergence},
        backend=backend,
        progress=progress,
    )
    loader = ml.DataLoader({"input": pixels[:1500]}, batch_size=64, shuffle=True)
    trainer.fit(loader, epochs, validation={"input": pixels[1500:]})
    return trainer


def draw(trainer: ml.Trainer, count: int) -> Any:
    """New images from the decoder alone, whose parameters are the trained ones of the same names."""
    compiled = ml.compile(decoder(), trainer.engine.backend, shapes={"input": [count, LATENT]}, inference=True)
    read = trainer.engine.backend.to_numpy
    decoder_params = {
        n.removeprefix("decoder."): read(x) for n, x in trainer.params.items() if n.startswith("decoder.")
    }
    compiled.load_state_dict(decoder_params)
    backend = trainer.engine.backend
    backend.set_seed(1)
    return read(compiled({"input": backend.randn((count, LATENT))})["output"]).reshape(count, 8, 8)


def as_text(images: Any) -> str:
    """Images side by side, a character for two levels of gray."""
    shades = " .:-=+*#%@"
    rows = np.concatenate(list(images), axis=1)
    return "\n".join("".join(shades[min(int(v * 10), 9)] * 2 for v in row) for row in rows)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="numpy")
    arguments.add_argument("--epochs", type=int, default=60)
    options = arguments.parse_args()
    trainer = train(options.backend, options.epochs)
    drawn = {"learning": trainer.history["loss"], "test": trainer.history["val_loss"]}
    picture = curves(PICTURES / "train_vae.svg", drawn, title=f"Autoencoder of digits on {options.backend}", x="epoch")
    print(f"learning curves: {picture}\n\nDigits that nobody wrote:\n{as_text(draw(trainer, 6))}")


if __name__ == "__main__":
    main()
