"""Beam search: the most probable texts of several beginnings at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril.backend import to_numpy
from mithril_hub.generation.session import Session
from mithril_hub.generation.stopping import Stopping


def beam_search(session: Session, prompt: list[int], beams: int, stopping: Stopping) -> list[int]:
    """Return the continuation of one prompt with the largest mean log-probability of its tokens.

    As in other libraries, twice as many candidates as beams compete at each step, so that those that end leave enough
    others, and the search stops when no open beam can improve on the finished ones.
    """
    logits = session.start([prompt])
    scores = _log_softmax(logits)[0]
    order = np.argsort(-scores, kind="stable")[: 2 * beams]
    rows: list[list[int]] = [[]]
    candidates = [(float(scores[t]), 0, int(t)) for t in order]
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
        rows = [[*rows[row], token] for _, row, token in open_]
        length = len(rows[0])
        best = open_[0][0] / length
        if length >= stopping.limit or (len(done) >= beams and done[-1][0] >= best):
            done += [(score / length, text) for (score, _, _), text in zip(open_, rows, strict=True)]
            return max(done, key=lambda d: d[0])[1]
        session = session.fork([row for _, row, _ in open_])
        scores = _log_softmax(session.extend([[token] for _, _, token in open_]))
        scores = scores + np.array([[score] for score, _, _ in open_])
        flat = np.argsort(-scores, axis=None, kind="stable")[: 2 * beams]
        vocabulary = scores.shape[1]
        candidates = [(float(scores.flat[k]), int(k // vocabulary), int(k % vocabulary)) for k in flat]


def _log_softmax(logits: Any) -> np.ndarray[Any, Any]:
    x: np.ndarray[Any, Any] = to_numpy(logits)[:, -1, :].astype(np.float32)
    x = x - x.max(axis=-1, keepdims=True)
    total: np.ndarray[Any, Any] = np.log(np.exp(x).sum(axis=-1, keepdims=True))
    x -= total
    return x
