"""``ml.generate``: tokens that continue prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mithril.backend import checked
from mithril.base import InputError
from mithril.runtime import CompiledModel, Runner
from mithril_hub.encoder.network import TextSettings
from mithril_hub.generation.beams import beam_search
from mithril_hub.generation.sampling import Sampler, Sampling
from mithril_hub.generation.session import Session
from mithril_hub.generation.source import Source
from mithril_hub.generation.speculation import speculate
from mithril_hub.generation.stopping import Stopping

Prompt = Sequence[int] | Sequence[Sequence[int]] | np.ndarray[Any, Any]
Model = CompiledModel | Runner | Session


@checked()
def generate(
    model: Any,
    prompt: Any = None,
    *,
    source: Any = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    num_beams: int = 1,
    stop: Sequence[Any] | None = None,
    seed: int = 0,
    on_token: Callable[[int, int], Any] | None = None,
    draft: Any = None,
    draft_tokens: int = 4,
) -> Any:
    """Return the tokens that continue a prompt, or those of each prompt of a batch, whose lengths may differ.

    ``model`` is a compiled decoder with a cache, a runner of it, or a ``Session``, whose cache is reused as far as it
    holds the beginning of the prompts. Temperature 0 takes the most probable token; other settings draw tokens that
    depend only on ``seed``, on every backend. ``stop`` lists tokens, or sequences of tokens, that end a row and belong
    to the result; the default is those of the checkpoint. ``on_token(row, token)`` is called for each token, and ends
    the row if it returns True. ``draft`` is a smaller model of the same vocabulary, which proposes ``draft_tokens``
    tokens at a time: the result is the same.

    Models of an encoder and a decoder read ``source``, tokens or lists of tokens of T5, spectra of Whisper. Their
    prompt is the beginning of the result, by default the token that begins a text in the checkpoint.
    """
    if max_new_tokens < 1:
        raise InputError(f"generate: max_new_tokens={max_new_tokens}, expected at least 1")
    session = model if isinstance(model, Session) else Session(model)
    prompts, single = _with_source(session, prompt, source) if _has_encoder(session, source) else _prompts(prompt)
    sources = session.source
    if stop is None:
        stop = session.text.stop if session.text is not None else ()
    stopping = Stopping(stop, on_token, max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if num_beams != 1:
        _check_beams(num_beams, sampling, draft, on_token)
        rows = [beam_search(_alone(session, sources, n), p, num_beams, stopping) for n, p in enumerate(prompts)]
    elif draft is not None:
        if sources is not None:
            raise InputError("generate: a draft does not go with an encoder", hint="remove draft")
        rows = [
            speculate(
                _alone(session, sources, n),
                draft,
                p,
                n,
                Sampler(sampling, session.backend.name, seed),
                stopping,
                draft_tokens,
            )
            for n, p in enumerate(prompts)
        ]
    else:
        rows = _sampled(session, prompts, Sampler(sampling, session.backend.name, seed), stopping)
    return rows[0] if single else rows


def _sampled(session: Session, prompts: list[list[int]], sampler: Sampler, stopping: Stopping) -> list[list[int]]:
    """Draw one token for each row at a time, until all rows have ended."""
    new: list[list[int]] = [[] for _ in prompts]
    logits = session.start(prompts)
    ended = [False] * len(prompts)
    while True:
        history = [p + t for p, t in zip(prompts, new, strict=True)]
        tokens = sampler.tokens(logits.reshape(logits.shape[0], logits.shape[2]), history)
        for b, token in enumerate(tokens):
            if not ended[b]:
                new[b].append(token)
                ended[b] = stopping.ends(b, new[b])
        if all(ended):
            return new
        # a row that has ended repeats its last token, whose logits nothing reads
        session.keep([len(p) + len(t) - 1 for p, t in zip(prompts, new, strict=True)])
        logits = session.extend([[t[-1]] for t in new])


def _has_encoder(session: Session, source: Any) -> bool:
    """Whether the model has an encoder; raise InputError if ``source`` does not fit that."""
    encoder = session.tokens == "decoder_input_ids"
    if source is not None and not encoder:
        raise InputError("generate: this model has no encoder that could read source", hint="generate(model, prompt)")
    if source is None and encoder:
        raise InputError(
            "generate: the encoder of this model requires source",
            hint="generate(model, source=tokens), or source=spectra for Whisper",
        )
    return encoder


def _with_source(session: Session, prompt: Any, source: Any) -> tuple[list[list[int]], bool]:
    """Set the source, and return one prompt for each of its rows, and whether it is a single one."""
    session.attend(source)
    assert session.source is not None
    rows, single = session.source.rows, session.source.single
    if prompt is None:
        prompt = list(session.text.start) if isinstance(session.text, TextSettings) else []
    prompts, one = _prompts(prompt)
    if one:
        prompts = prompts * rows
    if len(prompts) != rows:
        raise InputError(f"generate: {len(prompts)} prompts for {rows} rows of source")
    return prompts, single


def _alone(session: Session, source: Source | None, n: int) -> Session:
    """Return the session, prepared for the text ``n`` of several that are generated consecutively."""
    if source is not None:
        session.attend(source.row(n))
    return session


def _prompts(prompt: Any) -> tuple[list[list[int]], bool]:
    """Return prompts as lists of tokens, and whether there is only one, outside of a batch."""
    rows = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
    single = bool(rows) and all(isinstance(t, (int, np.integer)) for t in rows)
    batch = [rows] if single else [list(r) for r in rows]
    for row in batch:
        if not row or not all(isinstance(t, (int, np.integer)) and not isinstance(t, bool) for t in row):
            raise InputError("generate: a prompt is a list of at least one token", facts=[f"got {str(row)[:80]}"])
    if not batch:
        raise InputError("generate: there is no prompt", hint="pass a list of tokens, or a list of such lists")
    return [[int(t) for t in row] for row in batch], single


def _check_beams(num_beams: int, sampling: Sampling, draft: Any, on_token: Any) -> None:
    if num_beams < 1:
        raise InputError(f"generate: num_beams={num_beams}, expected at least 1")
    if sampling != Sampling() or draft is not None or on_token is not None:
        raise InputError(
            "generate: num_beams searches the most probable text, and does not go with sampling, draft or on_token",
            hint="remove num_beams, or the other arguments",
        )
