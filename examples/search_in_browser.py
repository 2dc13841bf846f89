"""Search by meaning in the browser: trains a small text encoder, and writes a site that ranks sentences for a query.

python examples/search_in_browser.py [--steps 3000] [--folder search_site]
python -m http.server -d search_site    # then open http://localhost:8000/search.html

The sentences for training are generated from a small grammar with synonyms, so the encoder knows these words only;
the page names the words of a query that it does not know.
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
from mithril import ops
from mithril.models import Embedding, Layer, Linear, TransformerEncoder

PAGE = Path(__file__).with_suffix(".html")
LENGTH, LAYERS, FEATURES, BATCH = 16, 2, 64, 32
PAD, UNKNOWN = 0, 1
# Rows are meanings, and the words of a row are synonyms.
ACTORS = """dog, puppy, hound | cat, kitten | boy, lad | girl, young lady | teacher, instructor | doctor, physician
farmer, peasant | mother, mom | thief, burglar, robber | policeman, cop, police officer | child, kid
neighbor, man next door | cook, chef | horse, pony | singer, vocalist | tourist, traveler"""
THINGS = """car, automobile, vehicle | bicycle, bike | house, home | phone, mobile | computer, laptop | coat, jacket
boat, ship | book, novel | picture, painting | money, cash | shoes, boots | meal, dinner"""
PLACES = """in the city, in town | in the forest, in the woods | in the garden, in the yard | at the store, in a shop
on the beach, at the seaside | at school, in the classroom | on the road, on the street"""
TIMES = """in the morning, at dawn | at night, after dark | in winter, in the cold season | today, this day
at noon, in the middle of the day"""
KINDS = "big, large, huge | small, little, tiny | old, ancient | new, modern | beautiful, pretty | expensive, costly"
# Forms of a verb: present, -ing, and before the actor of a passive sentence.
TOWARDS_ACTORS = """chases/chasing/chased by, pursues/pursuing/pursued by, runs after/running after
helps/helping/helped by, assists/assisting/assisted by, gives a hand to/giving a hand to
sees/seeing/seen by, notices/noticing/noticed by, spots/spotting/spotted by
calls/calling/called by, phones/phoning/phoned by | likes/liking/liked by, is fond of/being fond of
fears/fearing/feared by, is afraid of/being afraid of, is scared of/being scared of"""
TOWARDS_THINGS = """buys/buying/bought by, purchases/purchasing/purchased by | sells/selling/sold by
repairs/repairing/repaired by, fixes/fixing/fixed by, mends/mending/mended by
breaks/breaking/broken by, damages/damaging/damaged by | steals/stealing/stolen by, robs/robbing/robbed by
cleans/cleaning/cleaned by, washes/washing/washed by | loses/losing/lost by, misplaces/misplacing/misplaced by
finds/finding/found by, discovers/discovering/discovered by"""
SENTENCES = """The dog chases the cat in the garden. | The cat chases the dog in the garden.
A thief steals an old painting at night. | The policeman runs after the burglar on the street.
The mother buys a small bicycle in town. | The farmer sells his big house.
The boy breaks the new phone at school. | The doctor helps the tourist on the beach.
The tourist helps the doctor on the beach. | The teacher repairs the computer in the morning.
The child is afraid of the horse. | The horse is afraid of the child.
The chef cleans his shoes after dark. | The girl finds some money in the forest.
The neighbor washes the expensive car today. | The singer loses her coat in winter.
The boy likes the girl. | The cook phones the farmer at noon.
The traveler notices a beautiful ship at the seaside. | The instructor purchases a novel in a shop."""


def table(text: str) -> list[list[str]]:
    """Return the rows of a table of synonyms."""
    return [[word.strip() for word in row.split(",")] for row in re.split(r"[|\n]", text)]


Meaning = dict[str, int]  # the row of each part: actor, action, target, and perhaps kind, place, time
PARTS = {"kind": table(KINDS), "place": table(PLACES), "time": table(TIMES), "actor": table(ACTORS)}
SOCIAL = {**PARTS, "action": table(TOWARDS_ACTORS), "target": table(ACTORS)}
USEFUL = {**PARTS, "action": table(TOWARDS_THINGS), "target": table(THINGS)}


class World:
    """Draws meanings, and sentences and queries that express them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def meaning(self, held_out: bool = False) -> Meaning:
        """Draw a meaning; combinations of one in eight are held out, so that training never sees them."""
        while True:
            social = self.chance(0.5)
            tables = SOCIAL if social else USEFUL
            parts = ["actor", "action", "target", *(x for x in ("kind", "place", "time") if self.chance(0.5))]
            rows = {part: self.random.randrange(len(tables[part])) for part in parts}
            excluded = (rows["actor"] + 3 * rows["action"] + 5 * rows["target"]) % 8 == 0
            if excluded is held_out and not (social and rows["actor"] == rows["target"]):
                return {"social": social, **rows}

    def other(self, meaning: Meaning) -> Meaning:
        """Return the meaning with its two actors exchanged, or a new one."""
        if not meaning["social"]:
            return self.meaning()
        return {**meaning, "actor": meaning["target"], "target": meaning["actor"]}

    def express(self, meaning: Meaning, query: bool = False) -> str:
        """Return a sentence, or a query, which may be a question and leave parts out."""
        tables = SOCIAL if meaning["social"] else USEFUL
        words = {part: self.random.choice(tables[part][row]) for part, row in meaning.items() if part != "social"}
        forms = words["action"].split("/")
        if query:
            words = {
                part: word for part, word in words.items() if part in ("actor", "action", "target") or self.chance(0.5)
            }
        article = "" if query and self.chance(0.5) else self.random.choice(["the ", "a "])
        actor = article + words["actor"]
        target = article + f"{words.get('kind', '')} {words['target']}".strip()
        form = self.random.randrange(len(forms))
        text = [f"{actor} {forms[0]} {target}", f"{actor} is {forms[1]} {target}", f"{target} is {forms[-1]} {actor}"][
            form
        ]
        if query and not meaning["social"] and self.chance(0.6):
            questions = (
                f"{forms[1]} {target}",
                f"who {forms[0]} {target}",
                f"what is {actor} {forms[1]}",
                words["target"],
            )
            text = self.random.choice(questions)
        details = [words[part] for part in ("place", "time") if part in words]
        return " ".join([text, *details] if self.chance(0.7) else [*details, text])


def words_of(text: str) -> list[str]:
    return re.findall("[a-z]+", text.lower())


def vocabulary() -> list[str]:
    """Return the words of the tables and sentences, after the places of padding and of unknown words."""
    words = {"a", "the", "is", "who", "what", *words_of(SENTENCES)}
    for tables in (SOCIAL, USEFUL):
        words.update(word for rows in tables.values() for row in rows for text in row for word in words_of(text))
    return ["", "?", *sorted(words)]


VOCABULARY = vocabulary()
NUMBERS = {word: k for k, word in enumerate(VOCABULARY)}


def tokens(text: str) -> list[int]:
    """Return the numbers of the words, filled up to ``LENGTH``, as the function of that name on the page does."""
    numbers = [NUMBERS.get(word, UNKNOWN) for word in words_of(text)][:LENGTH]
    return numbers + [PAD] * (LENGTH - len(numbers))


class Encoder(Layer):
    """Tokens [N, LENGTH] to vectors [N, FEATURES] of length 1, near to each other if the texts mean the same."""

    inputs = ("tokens",)

    def __init__(self) -> None:
        self.words = Embedding(len(VOCABULARY), FEATURES)
        options = {"feedforward": 2 * FEATURES, "dropout": 0.0, "norm": True, "rotary": True}
        self.blocks = TransformerEncoder(LAYERS, FEATURES, heads=4, **options)
        self.head = Linear(FEATURES)

    def build(self, tokens: ml.Value) -> ml.Value:
        present = tokens > PAD
        x = self.blocks(self.words(tokens), ops.reshape(present, shape=(tokens.shape[0], 1, 1, LENGTH)))
        counted = ops.cast(ops.reshape(present, shape=(tokens.shape[0], LENGTH, 1)), dtype="float32")
        mean = ops.sum(x * counted, axis=1) / ops.sum(counted, axis=1)
        return ops.normalize(self.head(mean))


class Pairs(Layer):
    """Tokens [N, 2, 2, LENGTH] of N meanings with another, a query and a sentence of each, to similarities."""

    inputs = ("tokens",)

    def __init__(self) -> None:
        self.encoder = Encoder()

    def build(self, tokens: ml.Value) -> ml.Value:
        vectors = self.encoder(ops.reshape(tokens, shape=(4 * BATCH, LENGTH)))
        queries, sentences = (ops.reshape(vectors, shape=(2 * BATCH, 2, FEATURES))[:, k] for k in (0, 1))
        return 20.0 * (queries @ ops.transpose(sentences))


def own_sentence_first(output: ml.Value) -> ml.Value:
    """Return the loss: each query has to select its own sentence of the batch, and each sentence its query."""
    scores = ops.log_softmax(output, axis=0) + ops.log_softmax(output, axis=1)
    return -ops.mean(ops.diag(scores)) / 2.0


def train(steps: int, progress: bool | None = None) -> dict[str, np.ndarray]:
    """Return the parameters of a trained encoder."""
    world, data = World(seed=0), []
    for _ in range(steps * BATCH):
        meaning = world.meaning()
        meanings = meaning, world.other(meaning)
        data.append([[tokens(world.express(m, query)) for query in (True, False)] for m in meanings])
    samples = np.array(data, np.int32)
    lost = np.random.default_rng(1).random(samples.shape) < 0.03  # so that the encoder knows unknown words
    samples[lost & (samples > PAD)] = UNKNOWN
    schedule = ml.WarmUp(ml.Cosine(3e-3, steps, 1e-4), min(50, steps // 2))
    trainer = ml.Trainer(Pairs(), ml.AdamW(schedule), loss=own_sentence_first, backend="c", seed=0, progress=progress)
    trainer.fit(ml.DataLoader({"tokens": samples}, batch_size=BATCH), 1)
    return {name.removeprefix("encoder."): np.asarray(x) for name, x in trainer.params.items()}


def first_of_20(compiled: ml.CompiledModel, queries: int) -> tuple[float, float]:
    """Return the share of queries whose sentence is first, by the encoder and by the words that they share.

    Each query is for one of 20 sentences of which training saw no combination of actor, action and target; half of
    the sentences are another one with the actors exchanged, or unrelated.
    """
    world, right, shared = World(seed=1), 0, 0
    for _ in range(queries):
        meanings = [world.meaning(held_out=True) for _ in range(10)]
        meanings += [world.other(m) if m["social"] else world.meaning(held_out=True) for m in meanings]
        number = world.random.randrange(20)
        query, sentences = world.express(meanings[number], query=True), [world.express(m) for m in meanings]
        similar = encode(compiled, sentences) @ encode(compiled, [query])[0]
        common = [len({*words_of(query)} & {*words_of(s)}) / len(words_of(s)) ** 0.5 for s in sentences]
        right, shared = right + (similar.argmax() == number), shared + (np.argmax(common) == number)
    return right / queries, shared / queries


def encode(compiled: ml.CompiledModel, texts: list[str]) -> np.ndarray:
    return np.concatenate(
        [np.asarray(compiled({"tokens": np.array([tokens(text)], np.int32)})["output"]) for text in texts]
    )


def write(
    folder: str | os.PathLike[str], steps: int, queries: int = 200, progress: bool | None = None, **options: Any
) -> tuple[float, float]:
    """Write the site of a trained encoder, and return the result of ``first_of_20``."""
    shapes = {"tokens": [1, LENGTH]}
    compiled = ml.compile(Encoder(), "c", shapes=shapes, types={"tokens": "int32"}, inference=True)
    compiled.bind(train(steps, progress))
    sentences = [row[0] for row in table(SENTENCES)]
    example = np.array([tokens(sentences[0])], np.int32)
    print(compiled.export(folder, format="web", name="search", inputs={"tokens": example}, **options))
    texts = {"words": VOCABULARY, "length": LENGTH, "sentences": sentences}
    (Path(folder) / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    (Path(folder) / "search.html").write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    return first_of_20(compiled, queries)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=3000)
    arguments.add_argument("--folder", default="search_site")
    options = arguments.parse_args()
    right, shared = write(options.folder, options.steps)
    print(f"right sentence of 20 first: {right:.0%} of queries for new sentences ({shared:.0%} by the words in common)")
    print(f"serve {options.folder} and open search.html")


if __name__ == "__main__":
    main()
