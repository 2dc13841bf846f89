"""``ml.generate``: tokens that continue prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.backend import checked
from mithril.compiler import CompiledModel, Runner
from mithril.graph import InputError
from mithril_hub.encoder.network import TextSettings
from mithril_hub.generation.beams import beam_search
from mithril_hub.generation.prompts import check_vocabulary, read_prompts
from mithril_hub.generation.sampling import Sampler, Sampling
from mithril_hub.generation.session import Session, Source
from mithril_hub.generation.speculation import speculate
from mithril_hub.generation.stopping import Stopping

Prompt = Sequence[int] | Sequence[Sequence[int]] | np.ndarray[Any, Any]
Model = CompiledModel | Runner | Session


@checked(
    backend="compile the model for it: ml.generate(ml.compile(model, 'jax', ...), prompt)",
    tokenizer="encode the text: ml.generate(compiled, ml.Tokenizer(folder).encode(text))",
    max_tokens="write max_new_tokens=",
    max_length="write max_new_tokens=, which does not count the prompt",
    do_sample="write temperature=1.0 to sample, 0 for the most probable token",
    stream="write on_token=function, which is called with (row, token)",
    eos_token_id="write stop=[token]",
    num_return_sequences="repeat the prompt: prompts that occur more than once are continued differently",
)
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
) -> list[Any]:
    """Return the tokens that continue a prompt, or those of each prompt of a batch, whose lengths may differ.

    ``model`` is a compiled decoder with a cache, a runner of it, or a ``Session``, whose cache is reused as far as it
    holds the beginning of the prompts. Temperature 0 takes the most probable token; other settings draw tokens that
    depend only on ``seed``, on every backend: a row of a batch has those of its prompt alone, and prompts that occur
    more than once in a batch are continued differently. ``stop`` lists tokens, or sequences of tokens, that end a row
    and belong to the result; the default is those of the checkpoint. ``on_token(row, token)`` is called for each token,
    and ends the row if it returns True. ``draft`` is a smaller model of the same vocabulary, which proposes
    ``draft_tokens`` tokens at a time: the result is the same.

    Models of an encoder and a decoder read ``source``, tokens or lists of tokens of T5, spectra of Whisper. Their
    prompt is the beginning of the result, by default the token that begins a text in the checkpoint. For models of your
    own, ``source`` is a dictionary with the arrays of all other inputs, one row for each prompt.
    """
    if max_new_tokens < 1:
        raise InputError(f"generate: max_new_tokens={max_new_tokens}, expected at least 1")
    session = model if isinstance(model, Session) else Session(model)
    if isinstance(source, Mapping):
        prompts, single = read_prompts(prompt)
        session.attend(source)
    else:
        has_encoder = _has_encoder(session, source)
        prompts, single = _with_source(session, prompt, source) if has_encoder else read_prompts(prompt)
    session.check_source(len(prompts))
    if session.config is not None:
        check_vocabulary(prompts, session.config.vocabulary)
    sources = session.source
    samples = _samples(prompts, sources)
    if stop is None:
        stop = session.text.stop if session.text is not None else ()
    stopping = Stopping(stop, on_token, max_new_tokens)
    if not stopping.sequences and on_token is None:  # otherwise rows may end in time
        session.check_length(max(map(len, prompts)), max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if num_beams != 1:
        _check_beams(num_beams, sampling, draft, on_token)
        rows = [beam_search(_alone(session, sources, n), p, num_beams, stopping) for n, p in enumerate(prompts)]
    elif draft is not None:
        if session.is_recurrent:
            raise InputError(
                "generate: a draft requires a model that can forget tokens, and the states of this one cannot",
                facts=[f"recurrent states: {', '.join(session.recurrent[:4])}"],
                hint="remove draft",
            )
        if sources is not None:
            raise InputError("generate: a draft does not go with an encoder", hint="remove draft")
        helper, sampler = _draft(session, draft, draft_tokens), Sampler(sampling, session.backend.name, seed)
        rows = [
            speculate(session, helper, p, n, sampler, sample, stopping, draft_tokens)
            for n, (p, sample) in enumerate(zip(prompts, samples, strict=True))
        ]
    else:
        rows = _sampled(session, prompts, samples, Sampler(sampling, session.backend.name, seed), stopping)
    return rows[0] if single else rows


def _sampled(
    session: Session, prompts: list[list[int]], samples: list[int], sampler: Sampler, stopping: Stopping
) -> list[list[int]]:
    """Draw one token for each row at a time, until all rows have ended."""
    new: list[list[int]] = [[] for _ in prompts]
    logits = session.start(prompts)
    ended = [False] * len(prompts)
    while True:
        history = [p + t for p, t in zip(prompts, new, strict=True)]
        tokens = sampler.tokens(logits.reshape(logits.shape[0], logits.shape[2]), history, samples)
        for b, token in enumerate(tokens):
            if not ended[b]:
                new[b].append(token)
                ended[b] = stopping.ends(b, new[b])
        if all(ended):
            return new
        logits = session.extend([[] if e else t[-1:] for t, e in zip(new, ended, strict=True)])


def _samples(prompts: list[list[int]], source: Source | None) -> list[int]:
    """Return the number of earlier rows with the same prompt and source, so that rows are drawn as without the others.

    Only equal prompts draw different numbers.
    """
    counts: Counter[Any] = Counter()
    samples = []
    for n, prompt in enumerate(prompts):
        text = tuple(prompt), None if source is None else source.key(n)
        samples.append(counts[text])
        counts[text] += 1
    return samples


def _draft(session: Session, draft: Any, draft_tokens: int) -> Session:
    """Return the session of the model that proposes tokens."""
    if draft_tokens < 1:
        raise InputError(f"generate: draft_tokens={draft_tokens}, expected at least 1")
    helper = draft if isinstance(draft, Session) else Session(draft)
    if helper.runner is session.runner:
        raise InputError(
            "generate: the draft has the cache of the model, and their steps would overwrite each other",
            hint="pass a compiled model, or a runner of its own: draft=compiled.runner(params)",
        )
    return helper


def _has_encoder(session: Session, source: Any) -> bool:
    """Whether the model has an encoder; raise InputError if ``source`` does not fit that."""
    encoder = session.tokens == "decoder_input_ids"
    if source is not None and not encoder:
        raise InputError(
            "generate: this model has no encoder that could read source",
            hint="generate(model, prompt), or source={'input': array} for other inputs of a model of your own",
        )
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
    prompts, one = read_prompts(prompt)
    if one:
        prompts = prompts * rows
    if len(prompts) != rows:
        raise InputError(f"generate: {len(prompts)} prompts for {rows} rows of source")
    return prompts, single


def _alone(session: Session, source: Source | None, n: int) -> Session:
    """Return the session, prepared for the text ``n`` of several that are generated consecutively."""
    if source is not None:
        session.attend(source.selected([n]))
    return session


def _check_beams(num_beams: int, sampling: Sampling, draft: Any, on_token: Any) -> None:
    if num_beams < 1:
        raise InputError(f"generate: num_beams={num_beams}, expected at least 1")
    if sampling != Sampling() or draft is not None or on_token is not None:
        raise InputError(
            "generate: num_beams searches the most probable text, and does not go with sampling, draft or on_token",
            hint="remove num_beams, or the other arguments",
        )
