"""A small GPT learns to write, character by character, from this project's own files; then it writes.

python examples/train_char_gpt.py [--backend jax] [--steps 600] [--characters 300]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from gpt import gpt

import mithril as ml
from mithril.ops import threefry
from mithril_train.learning_curves import curves

ROOT = Path(__file__).parents[1]
PICTURES = Path(__file__).parent / "pictures"
LENGTH = 64
MODEL = {"length": LENGTH, "layers": 3, "heads": 4, "features": 96}


class Text:
    """Pieces of a text as a data set: each sample is ``LENGTH`` characters and the ones that follow them."""

    def __init__(self, text: str, alphabet: str) -> None:
        self.codes = np.array([alphabet.index(c) for c in text], np.int32)

    def __len__(self) -> int:
        return (len(self.codes) - 1) // LENGTH

    def __getitem__(self, k: int) -> dict[str, Any]:
        piece = self.codes[k * LENGTH : (k + 1) * LENGTH + 1]
        return {"input": piece[:-1], "target": piece[1:]}


def corpus() -> str:
    """Pages and operations of the project, in one fixed order."""
    operations = sorted((ROOT / "mithril-core/src/mithril/ops").glob("*.py"))
    pages = [*operations, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(page.read_text() for page in pages).encode("ascii", "ignore").decode()


def write(trainer: ml.Trainer, alphabet: str, prompt: str, characters: int, temperature: float = 0.7) -> str:
    """Draw characters one by one, from the portable generator: the same text from every backend, nearly always."""
    key = np.array([0, 2026], np.uint32)
    codes = [alphabet.index(c) for c in prompt]
    for k in range(characters):
        window = codes[-LENGTH:]
        padded = np.zeros((1, LENGTH), np.int32)  # one shape, so that one program serves all
        padded[0, : len(window)] = window
        logits = trainer.predict({"input": padded})[0, len(window) - 1].astype(np.float64) / temperature
        share = np.exp(logits - logits.max())
        word, _ = threefry(key, np.zeros(1, np.uint32), np.full(1, k, np.uint32))
        codes.append(int(np.searchsorted(np.cumsum(share / share.sum()), float(word[0]) / 2**32)))
    return "".join(alphabet[min(c, len(alphabet) - 1)] for c in codes)


def train(
    backend: str, steps: int, progress: bool | None = None, max_batches: int | None = None
) -> tuple[ml.Trainer, str]:
    """Return a trained model and its alphabet; ``max_batches`` limits the batches per epoch."""
    text = corpus() if max_batches is None else corpus()[: max_batches * 16 * LENGTH]
    alphabet = "".join(sorted(set(text)))
    cut = int(len(text) * 0.9)
    learn, test = Text(text[:cut], alphabet), Text(text[cut:], alphabet)
    loader = ml.DataLoader(learn, batch_size=16, shuffle=True, drop_last=True)
    epochs = max(1, round(steps / len(loader)))
    trainer = ml.Trainer(
        gpt(vocabulary=len(alphabet), **MODEL),
        ml.AdamW(
            ml.WarmUp(ml.Cosine(3e-3, epochs * len(loader), 3e-4), 50),
            beta2=0.98,
            weight_decay=0.05,
            groups={"*bias": {"weight_decay": 0.0}, "*ln_*": {"weight_decay": 0.0}},
        ),
        loss="cross_entropy",
        clip_norm=1.0,
        backend=backend,
        progress=progress,
    )
    trainer.fit(loader, epochs, validation=ml.DataLoader(test, batch_size=16, drop_last=True))
    return trainer, alphabet


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="jax")
    arguments.add_argument("--steps", type=int, default=600)
    arguments.add_argument("--characters", type=int, default=300)
    options = arguments.parse_args()
    trainer, alphabet = train(options.backend, options.steps)
    history = trainer.history
    steps_per_epoch = len(history.steps) // len(history)
    measured = [steps_per_epoch * (k + 1) for k in range(len(history))]
    drawn = {"each step": history.steps, "pages never seen": (measured, history["val_loss"])}
    picture = curves(
        PICTURES / "train_char_gpt.svg", drawn, title=f"Characters of this project's files, {options.backend}"
    )
    print(f"learning curves: {picture}\n")
    print(write(trainer, alphabet, "def ", options.characters))


if __name__ == "__main__":
    main()
