"""Tokenizers, chat templates, and the commands ``run`` and ``convert``."""

import json

import numpy as np
import pytest
from checkpoints import read_record, write_folder
from click.testing import CliRunner
from small_tokenizers import SAMPLES, train

import mithril as ml
from mithril.graph import InputError
from mithril_gguf.vocabulary import tokenizer_json
from mithril_hub.gguf.writing import tokenizer_entries

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """Return a checkpoint with a tokenizer of bytes: token 3 + n is the character n of the alphabet."""
    tokenizers = pytest.importorskip("tokenizers")
    record = read_record("llama2")
    write_folder(tmp_path / "model", record["config"], record["shapes"])
    alphabet = [*(chr(c) for c in range(32, 127)), "é"]
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{c: 3 + n for n, c in enumerate(alphabet)}}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    model.decoder = tokenizers.decoders.Fuse()
    model.add_special_tokens(["<pad>", "<s>", "</s>"])
    model.enable_truncation(3)
    model.save(str(tmp_path / "model" / "tokenizer.json"))
    settings = {"eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path / "model"


def test_text_and_back(folder):
    tokenizer = ml.Tokenizer(folder)
    tokens = tokenizer.encode("hello é")
    assert len(tokens) == 7, "the truncation that a file stores does not apply"
    assert tokenizer.decode(tokens) == "hello é" and len(tokenizer) == 99


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "qwen2", "spaces"])
def test_vocabularies_of_gguf_files(kind, tmp_path):
    """Restore the tokenizer from the entries of a GGUF file: the same tokens and texts for all kinds of decoders."""
    tokenizers = pytest.importorskip("tokenizers")
    original = train(kind)
    original.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    size = original.get_vocab_size()
    entries = tokenizer_entries(tmp_path, size + 3)
    assert entries["tokenizer.ggml.tokens"][size:] == [f"[PAD{size + n}]" for n in range(3)]
    assert entries["tokenizer.ggml.eos_token_id"] == original.token_to_id("</s>")
    assert entries["tokenizer.ggml.add_bos_token"] and entries["tokenizer.chat_template"] == TEMPLATE
    again = tokenizers.Tokenizer.from_str(tokenizer_json(entries, tmp_path))
    for text in SAMPLES:
        tokens = original.encode(text).ids
        assert again.encode(text).ids == tokens
        assert again.decode(tokens) == original.decode(tokens)


def test_vocabulary_of_bert_in_gguf_files(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    original = train("wordpiece")
    original.save(str(tmp_path / "tokenizer.json"))
    size = original.get_vocab_size()
    entries = tokenizer_entries(tmp_path, size + 2)
    numbers = {k.split(".")[2].removesuffix("_token_id"): v for k, v in entries.items() if k.endswith("_token_id")}
    assert numbers == {"padding": 0, "unknown": 1, "bos": 2, "cls": 2, "eos": 3, "seperator": 3, "mask": 4}
    again = tokenizers.Tokenizer.from_str(tokenizer_json(entries, tmp_path))
    for text in (*SAMPLES, "[MASK] dog ##s \u2581x"):
        assert again.encode(text).ids == original.encode(text).ids
        assert again.encode(text, "a fox").type_ids == original.encode(text, "a fox").type_ids
        assert again.decode(original.encode(text).ids) == original.decode(original.encode(text).ids)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"]["lowercase"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ml.UnsupportedError, match="keeps upper case"):
        tokenizer_entries(tmp_path, size)
    content["normalizer"]["lowercase"], content["model"]["continuing_subword_prefix"] = True, "@@"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ml.UnsupportedError, match=r"marks pieces by '@@'(\n|.)*without tokenizer.json"):
        tokenizer_entries(tmp_path, size)


def test_tokenizers_without_a_form_in_gguf(folder):
    with pytest.raises(ml.UnsupportedError, match="splits texts by nothing has no form in GGUF files"):
        tokenizer_entries(folder, 200)
    with pytest.raises(InputError, match="the tokenizer has token 98, the model 50 tokens"):
        tokenizer_entries(folder, 50)
    (folder / "tokenizer.json").write_text('{"model": []}')
    with pytest.raises(InputError, match="is not a readable tokenizer"):
        tokenizer_entries(folder, 200)
    with pytest.raises(ml.UnsupportedError, match="has no vocabulary that is supported"):
        tokenizer_json({"tokenizer.ggml.model": "none"}, folder)


def test_chat(folder):
    tokenizer = ml.Tokenizer(folder)
    tokens = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(tokens, special=True) == "<user>hi</s><assistant>"
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}")
    assert tokenizer.decode(tokenizer.chat([{"role": "a"}])) == '[{"role": "a"}]'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% include 'x' %}",
        "{% if %}",
        "{{ 1 // 0 }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_templates_cannot_leave_the_sandbox(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match="chat template"):
        ml.Tokenizer(folder).chat([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        ml.Tokenizer(folder)


def command(*arguments):
    from mithril_tools.cli import main

    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_run(folder):
    record = read_record("llama2")
    numbers = command("run", folder, " ".join(map(str, record["prompt"][:5])), "--tokens", "--max-new-tokens", 6)
    assert numbers.exit_code == 0 and numbers.output.split() == [str(t) for t in record["tokens"]["5"][:6]]
    tokenizer = ml.Tokenizer(folder)
    compiled = ml.compile(ml.from_pretrained(folder, cache=32), "numpy", inference=True)
    for option, prompt in (("--chat", tokenizer.chat([{"role": "user", "content": "hi"}])), ("--no-chat", [75, 76])):
        tokens = ml.generate(compiled, prompt, max_new_tokens=6)
        shown = command("run", folder, "hi", option, "--max-new-tokens", 6)
        assert shown.exit_code == 0 and shown.output == tokenizer.decode(tokens) + "\n"


def test_wrong_arguments_of_run(folder):
    assert "not a list of numbers" in command("run", folder, "a b", "--tokens").output
    assert "there is no folder" in command("run", folder / "no", "5", "--tokens").output


def test_pickles_become_safetensors(folder):
    torch = pytest.importorskip("torch")
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    torch.save({n: torch.tensor(x) for n, x in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    done = command("convert", folder / "pytorch_model.bin", folder / "model.safetensors")
    assert done.exit_code == 0, done.output
    again = load_file(folder / "model.safetensors")
    assert all(np.array_equal(again[n], x) for n, x in tensors.items())


def test_pickles_that_run_code_are_refused(folder, tmp_path):
    torch = pytest.importorskip("torch")

    class Harm:
        def __reduce__(self):
            return open, (str(tmp_path / "harm"), "w")

    torch.save({"a": Harm()}, folder / "bad.bin")
    done = command("convert", folder / "bad.bin", folder / "bad.safetensors")
    assert done.exit_code != 0 and "not a file of tensors" in done.output and not (tmp_path / "harm").exists()


def test_unknown_targets_of_convert(folder):
    assert "no format" in command("convert", folder, folder / "model.zip").output
