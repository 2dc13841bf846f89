"""Speculative decoding: a small model proposes tokens, and the large one checks them in one step.

Both draw with the same random numbers at each position, so the result is that of the large model alone.
"""

from __future__ import annotations

from typing import Any

from mithril_hub.generation.sampling import Sampler
from mithril_hub.generation.session import Session
from mithril_hub.generation.stopping import Stopping


def speculate(
    session: Session,
    helper: Session,
    prompt: list[int],
    row: int,
    sampler: Sampler,
    sample: int,
    stopping: Stopping,
    ahead: int,
) -> list[int]:
    """Return the tokens that continue one prompt."""
    logits = session.start([prompt])
    vocabularies = logits.shape[-1], helper.start([prompt]).shape[-1]
    new = _drawn(sampler, logits[0], [prompt], sample)
    while not stopping.ends(row, new):
        text = prompt + new
        # One less than the limit, since the check of the proposal always yields a token of its own.
        room = min(session.room(len(text)), helper.room(len(text)), ahead, stopping.limit - len(new) - 1)
        proposal = _proposed(helper, text, room, sampler, sample, vocabularies)
        # The last token is not in the cache yet: it was drawn, but never read.
        logits = session.verify([[new[-1], *proposal]])[0]
        histories = [text + proposal[:k] for k in range(len(proposal) + 1)]
        drawn = _drawn(sampler, logits, histories, sample)
        agreed = next((k for k, (a, b) in enumerate(zip(proposal, drawn, strict=False)) if a != b), len(proposal))
        for token in drawn[:agreed]:
            new.append(token)
            if stopping.ends(row, new):
                return new
        new.append(drawn[agreed])
        # Positions of rejected tokens are written in the cache; they are forgotten, and overwritten by
        # the next step.
        session.keep([len(text) + agreed])
    return new


def _drawn(sampler: Sampler, logits: Any, histories: list[list[int]], sample: int) -> list[int]:
    return sampler.tokens(logits, histories, [sample] * len(histories))


def _proposed(
    helper: Session, text: list[int], count: int, sampler: Sampler, sample: int, vocabularies: tuple[int, int]
) -> list[int]:
    """Return the next tokens of the small model, up to one that the models do not both know."""
    proposal: list[int] = []
    # A draft model may have a shorter vocabulary than the model.
    if count < 1 or max(text) >= min(vocabularies):
        return proposal
    while len(proposal) < count:
        token = _drawn(sampler, helper.start([text + proposal])[0], [text + proposal], sample)[0]
        if token >= min(vocabularies):
            break
        proposal.append(token)
    return proposal
