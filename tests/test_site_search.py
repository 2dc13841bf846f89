"""The search of the site answers questions of users with the right page first.

The scores approximate those of lunr in the theme: BM25 of titles and texts, titles weighted, times the weight of the
page. The task `docs` builds the index before.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

INDEX = Path(__file__).parents[1] / "build/site/search/search_index.json"
QUESTIONS = """
gradient clipping: recipes
custom loss: recipes
learning rate schedule: recipes
early stopping: recipes
checkpoint: recipes
resume: recipes
freeze layers: recipes
debug nan: recipes
reproducibility: recipes
seeds: recipes
own data set: recipes
fastapi: recipes
serve a model: recipes
docker: recipes
mixed precision: recipes
read a profile: recipes
kv cache: recipes
gradio: recipes
gradient accumulation: recipes
weight averaging: recipes
optuna: recipes
hyperparameter search: recipes
track experiments: recipes
wandb: reference/names/WandB
weights biases: recipes
netron: recipes
publish a model: recipes
load pytorch weights: importing
many devices: many-devices
image classifier: tutorials/image-classifier
fine-tune and serve: tutorials/language-model
port a repository: tutorials/porting-pytorch
model in the browser: (tutorials/browser|deploying)
webassembly: (tutorials/browser|deploying)
microcontroller: tutorials/microcontroller
cortex-m: tutorials/microcontroller
laptop to many devices: tutorials/laptop-to-many-devices
write a pass: (tutorials/a-pass|how-to/pass)
softmax: reference/(layers/Softmax|operations/softmax)
onnx: onnx
errors: (errors|compiling)
generation: pretrained
data loader: data
vmap: (reference/names/vmap|derivatives)
quantization: (quantization|deploying|training)
export c: (start|deploying)
checkpoints resuming: training
class weights: recipes
augmentation: data
second derivatives: derivatives
summary of a model: (looking|models|start)
write a backend: (tutorials/a-backend|writing-plugins|how-to/backend)
options: (options|reference/options|compiling)
tuning: optimizing
compare backends: (compiling|looking|optimizing)
memory report: (looking|compiling|optimizing|training)
distributed training: (training|many-devices)
hugging face: pretrained
keras: (migrating|importing|distributions/mithril-keras)
coming from pytorch: migrating
lora: recipes
own operation: derivatives
trainer: (training|reference/names/Trainer|start)
"""
PAIRS = [tuple(line.split(": ")) for line in QUESTIONS.strip().splitlines()]


def words(text):
    return re.findall(r"[a-z0-9_]+", re.sub(r"<[^>]*>", " ", text).lower())


@pytest.fixture(scope="module")
def search():
    if not INDEX.exists():
        pytest.skip("the site is not built")
    documents = json.loads(INDEX.read_text())["docs"]
    counts = [(Counter(words(d["title"])), Counter(words(d["text"])), d.get("boost", 1)) for d in documents]
    lengths = [sum(text.values()) for _, text, _ in counts]
    mean = sum(lengths) / len(lengths)
    spread = Counter(word for title, text, _ in counts for word in {*title, *text})

    def weight(count, length):
        return count * 2.2 / (count + 1.2 * (0.25 + 0.75 * length / mean)) if count else 0.0

    def first(question):
        terms = words(question)
        scores = []
        for (title, text, boost), length, document in zip(counts, lengths, documents, strict=True):
            if all(title[t] or text[t] for t in terms):
                rarity = {t: math.log(1 + len(documents) / spread[t]) for t in terms}
                score = sum(rarity[t] * (1000 * weight(title[t], mean) + weight(text[t], length)) for t in terms)
                scores.append((score * boost, document["location"]))
        return max(scores)[1] if scores else "nothing"

    return first


@pytest.mark.parametrize(("question", "page"), PAIRS)
def test_the_page_is_first(search, question, page):
    assert re.match(rf"{page}\.html", search(question))
