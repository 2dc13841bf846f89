"""Speculative decoding: a small model proposes tokens, and the large one checks them in one step.

Both draw with the same random numbers at each position, so the result is that of the large model alone.
"""

from __future__ import annotations

from typing import Any

from mithril_hub.generation.sampling import Sampler
from mithril_hub.generation.session import Session
from mithril_hub.generation.stopping import Stopping


def speculate(
    session: Session, draft: Any, prompt: list[int], row: int, sampler: Sampler, stopping: Stopping, ahead: int
) -> list[int]:
    """Return the tokens that continue one prompt."""
    helper = draft if isinstance(draft, Session) else Session(draft)
    new = _drawn(sampler, session.start([prompt])[0], [prompt], row)
    helper.start([prompt])
    while not stopping.ends(row, new):
        text = prompt + new
        room = min(session.capacity, helper.capacity) - len(text)
        proposal = _proposed(helper, text, min(ahead, room, stopping.limit - len(new) - 1), sampler, row)
        logits = session.verify([[new[-1], *proposal]])[0]
        histories = [text + proposal[:k] for k in range(len(proposal) + 1)]
        drawn = _drawn(sampler, logits, histories, row)
        agreed = next((k for k, (a, b) in enumerate(zip(proposal, drawn, strict=False)) if a != b), len(proposal))
        for token in drawn[:agreed]:
            new.append(token)
            if stopping.ends(row, new):
                return new
        new.append(drawn[agreed])
        session.keep([len(text) + agreed])
    return new


def _drawn(sampler: Sampler, logits: Any, histories: list[list[int]], row: int) -> list[int]:
    return sampler.tokens(logits, histories, [row] * len(histories))


def _proposed(helper: Session, text: list[int], count: int, sampler: Sampler, row: int) -> list[int]:
    """Return the next tokens of the small model."""
    proposal: list[int] = []
    while len(proposal) < count:
        logits = helper.start([text + proposal])
        proposal += _drawn(sampler, logits[0], [text + proposal], row)
    return proposal
