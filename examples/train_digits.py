"""Handwritten digits with a perceptron and a convolutional network: data, model, trainer, results.

    python examples/train_digits.py [--backend jax] [--epochs 30] [--torch]

``--torch`` trains the same networks with PyTorch alone, for comparison. Pictures are written to examples/pictures.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import mithril as ml
from mithril.models import Accuracy, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Model, Relu
from mithril_train.data import permutation
from mithril_train.learning_curves import curves

PICTURES = Path(__file__).parent / "pictures"
BATCH, RATE, DROPOUT = 64, 2e-3, 0.2


def data() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Images [N, 1, 8, 8] from 0 to 1 and labels: 1500 to learn from, 297 to test with."""
    digits = load_digits()
    order = permutation(len(digits.target), seed=0)
    images = (digits.images[order] / 16.0).astype(np.float32)[:, None]
    labels = digits.target[order].astype(np.int32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def perceptron() -> Model:
    model = Model()
    model += Flatten()(input="input")
    model += Linear(64, 128, name="hidden_1")
    model += Relu()
    model += Dropout(DROPOUT)
    model += Linear(128, 64, name="hidden_2")
    model += Relu()
    model += Linear(64, 10, name="classes")
    return model


def convolutional() -> Model:
    model = Model()
    model += Conv2d(1, 16, 3, padding=1, name="conv_1")(input="input")
    model += Relu()
    model += MaxPool2d(2)
    model += Conv2d(16, 32, 3, padding=1, name="conv_2")
    model += Relu()
    model += MaxPool2d(2)
    model += Flatten()
    model += Dropout(DROPOUT)
    model += Linear(128, 10, name="classes")
    return model


NETWORKS = {"MLP": perceptron, "CNN": convolutional}


def train(name: str, backend: str, epochs: int, progress: bool | None = None) -> ml.Trainer:
    """Return a trained network; ``trainer.history`` holds loss and accuracy of every epoch."""
    learn, test = data()
    steps = epochs * -(-len(learn[1]) // BATCH)
    trainer = ml.Trainer(
        NETWORKS[name](),
        ml.AdamW(ml.WarmUp(ml.Cosine(RATE, steps), 20), weight_decay=0.01),
        loss="cross_entropy",
        metrics=[Accuracy()],
        backend=backend,
        progress=progress,
    )
    trainer.fit(ml.DataLoader(learn, batch_size=BATCH, shuffle=True), epochs, validation=test)
    return trainer


def train_with_torch(name: str, epochs: int) -> float:
    """Train the same network in plain PyTorch; return the accuracy on the test images."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    (x, y), (test_x, test_y) = [tuple(torch.from_numpy(a) for a in part) for part in data()]
    if name == "MLP":
        layers = [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(128, 64), nn.ReLU()]
        network = nn.Sequential(*layers, nn.Linear(64, 10))
    else:
        first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        network = nn.Sequential(*first, *second, nn.Flatten(), nn.Dropout(DROPOUT), nn.Linear(128, 10))
    steps = epochs * -(-len(y) // BATCH)
    rate = ml.WarmUp(ml.Cosine(RATE, steps), 20)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01)
    step = 0
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(BATCH):
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows].long()).backward()
            optimizer.step()
            step += 1
    network.eval()
    return float((network(test_x).argmax(1) == test_y).float().mean())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="numpy")
    arguments.add_argument("--epochs", type=int, default=30)
    arguments.add_argument("--torch", action="store_true")
    options = arguments.parse_args()
    drawn = {}
    for name in NETWORKS:
        trainer = train(name, options.backend, options.epochs)
        drawn[f"{name}, learning"] = trainer.history["loss"]
        drawn[f"{name}, test"] = trainer.history["val_loss"]
        print(f"{name} on {options.backend}: accuracy {trainer.history['val_accuracy'][-1]:.3f} on images never seen")
        if options.torch:
            print(f"{name} with PyTorch alone: accuracy {train_with_torch(name, options.epochs):.3f}")
    picture = curves(PICTURES / "train_digits.svg", drawn, title=f"Digits on {options.backend}", x="epoch", log=True)
    print(f"learning curves: {picture}")


if __name__ == "__main__":
    main()
