"""Vocabularies of BERT in GGUF files: pieces that begin a word are marked, not those that continue one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril.graph import UnsupportedError

SPACE = "\u2581"
CONTINUES = "##"
WITHOUT = "export a copy of the folder without tokenizer.json: the file then evaluates numbers of tokens"
CLASSIFY, SEPARATE = "[CLS]", "[SEP]"
IDS = {  # key of a number of a token: the token
    "bos": CLASSIFY,
    "cls": CLASSIFY,
    "eos": SEPARATE,
    "seperator": SEPARATE,  # the format's own spelling
    "unknown": "[UNK]",
    "padding": "[PAD]",
    "mask": "[MASK]",
}


def wordpiece_entries(content: Mapping[str, Any], tokens: list[str], control: set[int]) -> dict[str, Any]:
    """Return the entries of a ``tokenizer.json`` whose tokens, in order, are ``tokens``."""
    model, normalizer = content["model"], content.get("normalizer") or {}
    if normalizer.get("type") != "BertNormalizer" or not normalizer.get("lowercase"):
        raise UnsupportedError(
            "a tokenizer of BERT that keeps upper case has no form in GGUF files: llama.cpp writes all texts small",
            hint=WITHOUT,
        )
    if model.get("continuing_subword_prefix", CONTINUES) != CONTINUES:
        raise UnsupportedError(
            f"a tokenizer that marks pieces by '{model['continuing_subword_prefix']}' has no form in GGUF files",
            facts=[f"written: '{CONTINUES}'"],
            hint=WITHOUT,
        )
    entries: dict[str, Any] = {"model": "bert"}
    entries["tokens"] = [t if n in control else _marked(t) for n, t in enumerate(tokens)]
    numbers = {t: n for n, t in enumerate(tokens)}
    entries |= {f"{key}_token_id": numbers[token] for key, token in IDS.items() if token in numbers}
    return {**entries, "add_bos_token": True, "add_eos_token": False}


def wordpiece_json(values: Mapping[str, Any], tokens: list[str], control: set[int]) -> dict[str, Any]:
    """Return the ``tokenizer.json`` of such entries, without added tokens."""
    pieces = [t if n in control else _plain(t) for n, t in enumerate(tokens)]
    vocabulary = {t: n for n, t in enumerate(pieces)}
    unknown = values.get("unknown_token_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(pieces):
        unknown = vocabulary.get("[UNK]", 0)
    model = {
        "type": "WordPiece",
        "vocab": vocabulary,
        "unk_token": pieces[unknown] if pieces else "",
        "continuing_subword_prefix": CONTINUES,
        "max_input_chars_per_word": 100,
    }
    content: dict[str, Any] = {
        "model": model,
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True},
    }
    if CLASSIFY in vocabulary and SEPARATE in vocabulary:
        content["post_processor"] = _template(vocabulary)
    return content


def _marked(token: str) -> str:
    return token.removeprefix(CONTINUES) if token.startswith(CONTINUES) else SPACE + token


def _plain(token: str) -> str:
    return token.removeprefix(SPACE) if token.startswith(SPACE) else CONTINUES + token


def _template(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    def special(token: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": kind}}

    first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    single = [special(CLASSIFY, 0), first, special(SEPARATE, 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, second, special(SEPARATE, 1)],
        "special_tokens": {t: {"id": t, "ids": [vocabulary[t]], "tokens": [t]} for t in (CLASSIFY, SEPARATE)},
    }
