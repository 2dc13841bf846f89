"""The fields that all requests to a model of texts have: its name, and texts or tokens."""

from __future__ import annotations

from typing import Any

from mithril_serve.limits import RequestError


def description(name: str, created: int) -> dict[str, Any]:
    """Return the model as clients list it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "mithril"}


def check_name(requested: str | None, served: str) -> None:
    """Raise RequestError unless a request is about the model of this server."""
    if requested is None:
        raise RequestError(400, "the field model is missing", "model")
    if requested != served:
        raise RequestError(404, f"the model {requested[:80]!r} does not exist; this server has {served!r}", "model")


def listed_prompts(prompt: Any, field: str) -> list[Any]:
    """Return the prompts of a field: a text, tokens, or a list of either."""
    if prompt is None:
        raise RequestError(400, f"the field {field} is missing", field)
    if isinstance(prompt, str) or (prompt and all(map(_is_token, prompt))):
        prompt = [prompt]
    for one in prompt:
        if not isinstance(one, str) and not (isinstance(one, list) and all(map(_is_token, one))):
            raise RequestError(400, f"{field} is a text, a list of tokens, or a list of either", field)
    if not prompt:
        raise RequestError(400, f"the {field} is empty", field)
    return list(prompt)


def tokens_of(prompt: str | list[int], tokenizer: Any, field: str) -> list[int]:
    """Return the tokens of a prompt."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(400, "the model has no tokenizer: prompts are lists of tokens", field)
        prompt = list(tokenizer.encode(prompt))
    if not prompt:
        raise RequestError(400, f"the {field} has no tokens", field)
    return prompt


def _is_token(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 1 << 31
