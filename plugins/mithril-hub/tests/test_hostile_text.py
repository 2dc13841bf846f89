"""Hostile chat templates and tokenizers: each ends soon, with an error of mithril."""

from __future__ import annotations

import json
import struct
from contextlib import nullcontext

import numpy as np
import pytest
from safetensors.numpy import save_file

import mithril as ml
from mithril.models import Linear
from mithril_hub.checkpoint.folder import read_text, tensors_of
from mithril_hub.text.tokenizer import rendered

NESTED = "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
NESTED += "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
LONG = "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
TEMPLATES = [
    *(
        LOOP,
        CALLS,
        "{{ '%0999999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ 2 ** 999999999 }}",
    ),
    *("{{ 'a'|center(9999999999) }}", "{{ 'a\nb'|indent(9999999999) }}", "{{ [1]|slice(99999999)|list }}"),
    *("{{ [1]|tojson(indent=999999999) }}", "{{ range(99999)|join('x' * 100000) }}", "{{ '{:999999999}'.format(1) }}"),
    *("{{ ('a ' * 10000)|wordwrap(99999999) }}", "{{ 'a'.ljust(999999999) }}", "{{ lipsum(99999999) }}", "{% break %}"),
    *("{{ ('a' * 100000).replace('a', 'b' * 100000) }}", "{{ '\ud800' }}", "{{ 1.5|round(999999999, 'ceil') }}"),
    *(LONG + "{% set n.x = n.x ~ n.x %}{% endfor %}", LONG + "{% set n.x = n.x + n.x %}{% endfor %}"),
    *(NESTED + "{{ n.x }}", NESTED + "{{ n.x|tojson }}", NESTED + "{{ n.x == n.y }}", NESTED + "{{ n.x is eq(n.y) }}"),
    *(
        NESTED + "{{ '%s' % n.x }}",
        NESTED + "{{ '{}'.format(n.x) }}",
        NESTED + "{{ 'a' ~ n.x }}",
        NESTED + "{{ n.x|upper }}",
    ),
    *(
        NESTED + "{{ raise_exception(n.x) }}",
        "{% set l = range(99999)|list %}{% for i in l %}{% set x = l[1:] %}{% endfor %}",
    ),
    *("{{ " + "(" * 3000, "{% if 1 %}" * 500, "{% include 'x' %}", "x" * 200_000, "{{ ().__class__.__mro__ }}"),
]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: ascii(t[-40:]))
def test_templates_end(template):
    with pytest.raises(ml.InputError, match="the chat template"):
        rendered(template, {"messages": []})


def test_steps_at_the_edge():
    template = "{% for a in range(99) %}{% for b in range(99) %}{% endfor %}{% endfor %}"
    with ml.reader_limits(steps=90_000), pytest.raises(ml.InputError, match="more than the limit 'steps'"):
        rendered(template, {})
    with ml.reader_limits(steps=200_000):
        assert rendered(template, {}) == ""


def test_long_conversations_fit():
    messages = [
        {"role": "user", "content": "hello world " * 2000},
        {"role": "assistant", "content": "</think>so " * 2000},
    ] * 20
    template = (
        "{% for m in messages %}{% if loop.index0 == messages|length - 1 %}L{% endif %}{% if 'tool' in m %}T{% endif %}"
        "{{ '<s>' ~ m.role + '\n' + m.content|trim }}"
        "{% set c = m.content.split('</think>')[-1].replace('so', 'then') %}"
        "{{ c }}{{ messages[1:]|length }}{{ m|tojson(indent=4)|length }}{{ m.content[-3:] }}{% endfor %}"
    )
    assert rendered(template, {"messages": messages}).count("<s>") == 40


def gguf_of(path, tokens):
    def text(value):
        return struct.pack("<Q", len(value)) + value

    pairs = text(b"tokenizer.ggml.model") + struct.pack("<I", 8) + text(b"gpt2")
    pairs += text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(tokens)) + b"".join(map(text, tokens))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pairs + bytes(64))
    return path


def test_a_vocabulary_that_repeats_a_token(tmp_path):
    tokenizer = None
    try:
        tokenizer = ml.Tokenizer(gguf_of(tmp_path / "m.gguf", [b"a"] * 32))
    except ml.InputError as error:
        assert "m.gguf" in str(error)
    assert tokenizer is None or len(tokenizer) <= 32


@pytest.mark.parametrize(
    "content", ["[", "[" * 100_000, "{}", '{"model": 5}', '{"added_tokens": 5, "model": {"type": "BPE"}}']
)
def test_damaged_tokenizers(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ml.InputError, match=r"tokenizer\.json"):
        ml.Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("length", "message"), [(4096, None), (4097, "limit 'piece'"), (1 << 20, "1,048,576 characters")]
)
def test_long_pieces(tmp_path, length, message):
    """Refuse pieces whose model the library frees by a deep recursion: one of a million ended the process."""
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a" * length, -1.0]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    with nullcontext() if message is None else pytest.raises(ml.InputError, match=message):
        assert len(ml.Tokenizer(tmp_path)) == 2


@pytest.mark.parametrize("vocabulary", [5, [5], [[]], [[5, 0]], {"a": 1}])
def test_damaged_pieces(tmp_path, vocabulary):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": vocabulary}}))
    with pytest.raises(ml.InputError, match="is not a readable tokenizer"):
        ml.Tokenizer(tmp_path)


def test_files_behind_links(tmp_path):
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "outside.safetensors")
    (tmp_path / "outside").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        (folder / name).symlink_to(tmp_path / "outside")
        with pytest.raises(ml.InputError, match="a link that leads out of its folder"):
            read_text(folder, name)
    (folder / "part.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    with pytest.raises(ml.InputError, match="a link that leads out of its folder"):
        tensors_of(folder)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    (snapshot.parents[1] / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs" / "x").write_text("{}")
    (snapshot / "config.json").symlink_to(snapshot.parents[1] / "blobs" / "x")
    assert read_text(snapshot, "config.json") == "{}"


@pytest.mark.parametrize("shape", [[0, 1 << 40, 1 << 40], [1] * 100, [0, 1 << 62], [1 << 47, 1 << 47]])
def test_shapes_that_no_array_has(tmp_path, shape):
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ml.InputError, match="is damaged"):
        ml.open_weights(path)


@pytest.mark.parametrize("states", ["5", "[[[", '[["a"]]', "[" * 100_000])
def test_damaged_names_of_states(tmp_path, states):
    compiled = ml.compile(Linear(4), "numpy", shapes={"input": [2, 3]})
    params = {n: np.zeros(t.shape, np.float32) for n, t in compiled.programs[-1].interface.params.items()}
    save_file(params, tmp_path / "w.safetensors", {"states": states})
    with pytest.raises(ml.InputError, match="the entry 'states'"):
        compiled.load(tmp_path / "w.safetensors")
