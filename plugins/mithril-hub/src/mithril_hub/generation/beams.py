"""Beam search: the most probable texts of several beginnings at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril_hub.generation.sampling import undefined
from mithril_hub.generation.session import Session
from mithril_hub.generation.stopping import Stopping

Array = np.ndarray[Any, Any]


def beam_search(session: Session, prompt: list[int], beams: int, stopping: Stopping) -> list[int]:
    """Return the continuation of one prompt with the largest mean log-probability of its tokens.

    As in other libraries, more candidates than beams compete at each step, so that those that end leave enough others,
    and the search stops when no open beam can improve on the finished ones.
    """
    rows: list[list[int]] = [[]]
    # At most one token ends a row by each stop sequence.
    competing = beams * max(2, 1 + len(stopping.sequences))
    candidates = _best(_log_softmax(session, session.start([prompt])), competing)
    done: list[tuple[float, list[int]]] = []
    while True:
        open_: list[tuple[float, int, int]] = []
        for score, row, token in candidates:
            text = [*rows[row], token]
            if stopping.stops(text):
                if len(open_) < beams:
                    done.append((score / len(text), text))
            elif len(open_) < beams:
                open_.append((score, row, token))
        done = sorted(done, key=lambda d: -d[0])[:beams]
        if not open_:
            return done[0][1]
        rows = [[*rows[row], token] for _, row, token in open_]
        length = len(rows[0])
        best = open_[0][0] / length
        if length >= stopping.limit or (len(done) >= beams and done[-1][0] >= best):
            done += [(score / length, text) for (score, _, _), text in zip(open_, rows, strict=True)]
            return max(done, key=lambda d: d[0])[1]
        session = session.fork([row for _, row, _ in open_])
        scores = _log_softmax(session, session.extend([[token] for _, _, token in open_]))
        candidates = _best(scores + np.array([[score] for score, _, _ in open_]), competing)


def _best(scores: Array, count: int) -> list[tuple[float, int, int]]:
    """Return the largest scores, with their rows and tokens; the first ones of equal scores."""
    flat = scores.reshape(-1)
    if count < flat.size:
        lowest = np.partition(flat, flat.size - count)[flat.size - count]
        positions = np.flatnonzero(flat >= lowest)
    else:
        positions = np.arange(flat.size)
    order = positions[np.argsort(-flat[positions], kind="stable")][:count]
    return [(float(flat[k]), *map(int, divmod(k, scores.shape[1]))) for k in order]  # type: ignore[misc]


def _log_softmax(session: Session, logits: Any) -> Array:
    x: Array = session.backend.to_numpy(logits)[:, -1, :].astype(np.float32)
    if np.isnan(x).any():
        raise undefined(int(np.isnan(x).any(axis=-1).argmax()))
    x = x - x.max(axis=-1, keepdims=True)
    total: Array = np.log(np.exp(x).sum(axis=-1, keepdims=True))
    x -= total
    return x
