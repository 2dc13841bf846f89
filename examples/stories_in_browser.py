"""A small language model writes stories in the browser: trains it on generated stories and writes a site.

python examples/stories_in_browser.py [--steps 1200] [--folder stories_site]
python -m http.server -d stories_site    # then open http://localhost:8000/stories.html

The model reads and writes characters. It has to learn to spell, to build sentences, and to remember colors and things.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np

import mithril as ml
from mithril.models import Embedding, Linear, Sequential, TransformerEncoder

PAGE = Path(__file__).with_suffix(".html")
LENGTH, BATCH = 208, 8
LAYERS, FEATURES = 2, 96
PEOPLE = ["Mia", "Lea", "Ana", "Eva", "Ida", "Ben", "Tom", "Max", "Leo", "Sam"]  # the first half are girls
COLORS = ["red", "blue", "green", "yellow", "white", "black"]
TOYS = ["boat", "ball", "kite", "drum", "book", "doll", "train", "hat"]
PLACES = ["the lake", "the park", "school", "the beach", "the garden", "the market"]
ANIMALS = ["dog", "cat", "duck", "horse", "rabbit", "fox"]
ENDS = ["it gets dark", "it starts to rain", "the sun goes down", "dinner is ready"]


def story(draw: random.Random) -> str:
    """Return a story of four or five sentences."""
    hero, friend = draw.sample(PEOPLE, 2)
    she, her = ("She", "her") if PEOPLE.index(hero) < 5 else ("He", "his")
    color, toy, place, animal = (draw.choice(words) for words in (COLORS, TOYS, PLACES, ANIMALS))
    begins = (
        f"{hero} has a {color} {toy}. ",
        f"{hero} got a {color} {toy} today. ",
        f"{hero} loves {her} {color} {toy}. ",
    )
    goes = (
        f"{she} takes the {color} {toy} to {place}. ",
        f"One day {she.lower()} goes to {place} with the {color} {toy}. ",
    )
    meets = f"There {she.lower()} meets {friend}. ", f"{friend} is there, too. "
    wants = f"{friend} likes the {color} {toy}. ", f'"What a nice {toy}!" says {friend}. '
    hides = f"{friend} is there with a {animal}. ", f"The {animal} hides the {color} {toy}, but {hero} finds it. "
    ends = f"They play until {draw.choice(ENDS)}.", f"Then {hero} takes the {color} {toy} home.", f"{hero} is happy."
    middle = hides if draw.random() < 0.4 else (draw.choice(meets), draw.choice(wants))
    return "".join([draw.choice(begins), draw.choice(goes), *middle, draw.choice(ends)]) + "\n"


STORIES = [story(random.Random(seed)) for seed in range(6000)]
ALPHABET = "".join(sorted(set("".join(STORIES))))
WORDS = set(re.findall("[A-Za-z]+", "".join(STORIES)))


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pieces of text that begin with a story, and for each of their characters the next."""
    draw, pieces = random.Random(0), []
    for _ in range(count):
        text = ""
        while len(text) <= LENGTH:
            text += draw.choice(STORIES)
        pieces.append([ALPHABET.index(c) for c in text[: LENGTH + 1]])
    codes = np.array(pieces, np.int32)
    return codes[:, :-1], codes[:, 1:]


def network() -> Sequential:
    """Characters [N, L] to scores of the next ones [N, L, characters]; keys and values of earlier calls are states."""
    options = {
        "feedforward": 4 * FEATURES,
        "dropout": 0.0,
        "norm": True,
        "norm_first": True,
        "rotary": True,
        "cache": LENGTH,
    }
    blocks = TransformerEncoder(LAYERS, FEATURES, heads=4, **options)
    return Sequential(Embedding(len(ALPHABET), FEATURES), blocks, Linear(len(ALPHABET)))


def train(steps: int, progress: bool | None = None) -> dict[str, np.ndarray]:
    """Return the parameters of a trained model."""
    schedule = ml.WarmUp(ml.Cosine(5e-3, steps, 2e-4), min(50, steps // 2))
    optimizer = ml.AdamW(schedule, beta2=0.98)
    trainer = ml.Trainer(
        network(), optimizer, loss="cross_entropy", clip_norm=1.0, backend="c", seed=0, progress=progress
    )
    trainer.fit(*samples(steps * BATCH), epochs=1, batch_size=BATCH)
    return {name: np.asarray(x) for name, x in trainer.params.items()}


def write_story(compiled: ml.CompiledModel, begin: str, seed: int, temperature: float = 0.8) -> str:
    """Continue a story to its end, one character at a time."""
    model, draw, text = compiled.runner(), np.random.default_rng(seed), begin
    for position in range(LENGTH):
        code = np.array([[ALPHABET.index(text[position])]], np.int32)
        logits = np.asarray(model({"input": code})["output"])[0, 0].astype(np.float64)
        if position + 1 < len(text):
            continue  # still reading
        shares = np.exp((logits - logits.max()) / temperature)
        text += ALPHABET[draw.choice(len(shares), p=shares / shares.sum())]
        if text[-1] == "\n":
            break
    return text


def is_right(text: str) -> bool:
    """Whether a story ends, all its words are known, and the thing stays the same, in kind and color."""
    words = set(re.findall("[A-Za-z]+", text))
    return text.endswith("\n") and words <= WORDS and len(words & {*COLORS}) == 1 and len(words & {*TOYS}) == 1


def write(
    folder: str | os.PathLike[str], steps: int, stories: int = 50, progress: bool | None = None, **options: Any
) -> float:
    """Write the site of a trained model, and return the share of right ones among some stories that it writes."""
    shapes, types = {"input": [1, 1]}, {"input": "int32"}
    compiled = ml.compile(network(), "c", shapes=shapes, types=types, inference=True).bind(train(steps, progress))
    example = {"input": np.array([[ALPHABET.index("M")]], np.int32)}
    print(compiled.export(folder, format="web", name="stories", inputs=example, **options))
    facts = {"alphabet": ALPHABET, "length": LENGTH, "people": PEOPLE}
    (Path(folder) / "about.json").write_text(json.dumps(facts), encoding="utf-8")
    (Path(folder) / "stories.html").write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    return sum(is_right(write_story(compiled, f"{PEOPLE[k % len(PEOPLE)]} ", k)) for k in range(stories)) / stories


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=1200)
    arguments.add_argument("--folder", default="stories_site")
    options = arguments.parse_args()
    right = write(options.folder, options.steps)
    print(f"{right:.0%} of 50 stories have known words only, one thing of one color, and an end")
    print(f"serve {options.folder} and open stories.html")


if __name__ == "__main__":
    main()
