"""Vocabularies in GGUF files: the entries ``tokenizer.*`` from a ``tokenizer.json``, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mithril.graph import InputError, MithrilError, UnsupportedError
from mithril_gguf.reader import read_metadata
from mithril_gguf.wordpiece import wordpiece_entries, wordpiece_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
SPACE = "\u2581"

# The patterns that split texts into words, by the name that llama.cpp gives them.
PATTERNS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def vocabulary_entries(path: Path, content: Any, settings: Any, template: str | None, size: int) -> dict[str, Any]:
    """Return the entries for a model of ``size`` tokens.

    ``content`` is the ``tokenizer.json`` at ``path``, ``settings`` the ``tokenizer_config.json``, and ``template`` the
    chat template.
    """
    try:
        entries = _entries(content, settings, size)
    except MithrilError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(f"'{path}' is not a readable tokenizer", facts=[f"{type(error).__name__}: {error}"]) from None
    entries = {PREFIX + key: value for key, value in entries.items()}
    return entries if template is None else {**entries, TEMPLATE: template}


def _entries(content: Any, settings: Any, size: int) -> dict[str, Any]:
    model = content["model"]
    if model.get("type", "BPE") not in ("BPE", "WordPiece"):
        raise _unsupported(f"a tokenizer of the type {model.get('type')}")
    vocabulary = {**model["vocab"], **{t["content"]: t["id"] for t in content.get("added_tokens") or ()}}
    if max(vocabulary.values()) >= size:
        raise InputError(f"the tokenizer has token {max(vocabulary.values())}, the model {size} tokens")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", ())]
    tokens, types = [f"[PAD{n}]" for n in range(size)], [UNUSED] * size
    for token, n in vocabulary.items():
        tokens[n], types[n] = token, NORMAL
    fallback = bool(model.get("byte_fallback"))
    for n, token in enumerate(tokens):
        if fallback and types[n] == NORMAL and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[n] = BYTE
    for t in content.get("added_tokens") or ():
        types[t["id"]] = CONTROL if t.get("special") else USER_DEFINED
    entries: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if model.get("type") == "WordPiece":
        control = {n for n, kind in enumerate(types) if kind != NORMAL}
        return entries | wordpiece_entries(content, tokens, control)
    if fallback:
        types[vocabulary[model["unk_token"]]] = UNKNOWN
        entries |= {"model": "llama", "scores": _scores(tokens, merges)}
        entries["add_space_prefix"] = _adds_space(content)
        entries["unknown_token_id"] = vocabulary[model["unk_token"]]
    else:
        entries |= {"model": "gpt2", "pre": _pattern(content), "merges": merges}
    begins = _begins_with(content)
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if token in vocabulary:
            entries[f"{key}_token_id"] = vocabulary[token]
    if begins is not None:
        entries["bos_token_id"] = vocabulary[begins]
    entries["add_bos_token"] = begins is not None
    return entries


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return a score for each token: earlier merges have larger ones, as the pieces of SentencePiece."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _steps(content: Any, part: str) -> Iterator[Any]:
    """Yield the steps of a part of the tokenizer, those of sequences one by one."""
    stack = [content.get(part)]
    while stack:
        step = stack.pop(0)
        if isinstance(step, Mapping):
            inner = step.get("normalizers") or step.get("pretokenizers") or step.get("processors")
            stack = [*inner, *stack] if inner else stack
            if not inner:
                yield step


def _adds_space(content: Any) -> bool:
    steps = [*_steps(content, "normalizer"), *_steps(content, "pre_tokenizer")]
    first = any(s["type"] == "Metaspace" and s.get("prepend_scheme", "always") != "never" for s in steps)
    return first or any(s["type"] == "Prepend" for s in steps)


def _pattern(content: Any) -> str:
    steps = list(_steps(content, "pre_tokenizer"))
    kinds = [s["type"] for s in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0].get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"]:
        text = steps[0]["pattern"].get("Regex")
        for name, pattern in PATTERNS.items():
            if text == pattern:
                return name
    raise _unsupported(f"a tokenizer that splits texts by {', '.join(kinds) or 'nothing'}")


def _begins_with(content: Any) -> str | None:
    """Return the special token that begins every text."""
    for step in _steps(content, "post_processor"):
        if step["type"] == "TemplateProcessing" and step["single"] and "SpecialToken" in step["single"][0]:
            return str(step["single"][0]["SpecialToken"]["id"])
    return None


def _unsupported(tokenizer: str) -> UnsupportedError:
    return UnsupportedError(
        f"{tokenizer} has no form in GGUF files",
        facts=[
            f"written: byte-level BPE split as by {', '.join(['gpt-2', *PATTERNS])}",
            "written: BPE with bytes as fallback, WordPiece in lower case",
        ],
        hint="export a copy of the folder without tokenizer.json: the file then evaluates numbers of tokens",
    )


# -- reading ----------------------------------------------------------------------------------------------------------
def read_entries(path: Path) -> dict[str, Any]:
    """Return the entries ``tokenizer.*`` of a GGUF file."""
    return {name: value for name, value in read_metadata(path).items() if name.startswith("tokenizer.")}


def tokenizer_json(entries: Mapping[str, Any], path: Path) -> str:
    """Return the ``tokenizer.json`` of the entries of a GGUF file."""
    values = {k.removeprefix(PREFIX): v for k, v in entries.items()}
    kind, tokens, types = values.get("model", "none"), values.get("tokens"), values.get("token_type")
    if kind not in ("gpt2", "llama", "bert") or not isinstance(tokens, list):
        raise UnsupportedError(
            f"'{path}' has no vocabulary that is supported",
            facts=[f"tokenizer.ggml.model: {kind!r}", "read: 'gpt2', 'llama', 'bert'"],
            hint="pass numbers of tokens: mithril run FILE '5 17 42' --tokens",
        )
    types = types if isinstance(types, list) and len(types) == len(tokens) else [NORMAL] * len(tokens)
    vocabulary = {t: n for n, t in enumerate(tokens) if types[n] != UNUSED}
    added = [
        {"id": n, "content": t, "special": types[n] == CONTROL, "normalized": False, **_PLAIN}
        for n, t in enumerate(tokens)
        if types[n] in (CONTROL, USER_DEFINED)
    ]
    if kind == "bert":
        special = {n for n, t in enumerate(types) if t != NORMAL}
        return json.dumps({"version": "1.0", "added_tokens": added, **wordpiece_json(values, tokens, special)})
    model: dict[str, Any] = {"type": "BPE", "vocab": vocabulary, "unk_token": None}
    content: dict[str, Any] = {"version": "1.0", "added_tokens": added, "model": model}
    if kind == "gpt2":
        content |= _byte_level(str(values.get("pre", "gpt-2")), path)
        model["merges"] = values.get("merges") or []
    else:
        content |= _with_spaces(values.get("add_space_prefix", True))
        unknown = values.get("unknown_token_id")
        model |= {"byte_fallback": True, "fuse_unk": True}
        model["unk_token"] = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
        model["merges"] = _merges(vocabulary, values.get("scores") or [], types)
    begin = values.get("bos_token_id")
    if values.get("add_bos_token", kind == "llama") and isinstance(begin, int) and 0 <= begin < len(tokens):
        content["post_processor"] = _template(tokens[begin], begin)
    return json.dumps(content)


_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False}


def _byte_level(pre: str, path: Path) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre == "gpt-2"}
    steps: list[Any] = [level]
    if pre != "gpt-2":
        if pre not in PATTERNS:
            raise UnsupportedError(
                f"'{path}' splits texts as '{pre}', which is not supported",
                facts=[f"read: gpt-2, {', '.join(PATTERNS)}"],
                hint="pass numbers of tokens: mithril run FILE '5 17 42' --tokens",
            )
        split = {"type": "Split", "pattern": {"Regex": PATTERNS[pre]}, "behavior": "Isolated", "invert": False}
        steps.insert(0, split)
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "decoder": level}


def _with_spaces(prefix: Any) -> dict[str, Any]:
    normalizers: list[Any] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    decoders: list[Any] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}]
    decoders.append({"type": "Fuse"})
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _merges(vocabulary: Mapping[str, int], scores: list[float], types: list[int]) -> list[list[str]]:
    """Return the merges that yield each piece, the best pieces first."""
    if len(scores) != len(types):
        raise InputError(f"the GGUF file has {len(scores)} scores for {len(types)} tokens")
    pieces = sorted((t for t, n in vocabulary.items() if types[n] == NORMAL), key=lambda t: (-scores[vocabulary[t]], t))
    merges = []
    for piece in pieces:
        parts = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        parts = [(a, b) for a, b in parts if a in vocabulary and b in vocabulary]
        merges += [[a, b] for a, b in sorted(parts, key=lambda p: (vocabulary[p[0]], vocabulary[p[1]]))]
    return merges


def _template(token: str, n: int) -> dict[str, Any]:
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    text = [{"Sequence": {"id": k, "type_id": 0}} for k in ("A", "B")]
    return {
        "type": "TemplateProcessing",
        "single": [special, text[0]],
        "pair": [special, text[0], special, text[1]],
        "special_tokens": {token: {"id": token, "ids": [n], "tokens": [token]}},
    }
