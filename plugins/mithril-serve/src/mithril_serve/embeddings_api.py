"""The interface of OpenAI for models that return one vector for each text."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import defaultdict
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mithril_serve.batcher import Batcher
from mithril_serve.limits import Fields, Limits, RequestError, parsed, read_body
from mithril_serve.prompts import check_name, description, listed_prompts, tokens_of

TEXTS = 2048  # of one request, as in OpenAI's interface


class Embeddings:
    """The routes of an encoder of text whose output ``embedding`` is one vector for each text."""

    def __init__(self, batcher: Batcher, name: str, tokenizer: Any, limits: Limits) -> None:
        self.batcher, self.name, self.tokenizer, self.limits = batcher, name, tokenizer, limits
        self.created = int(time.time())
        config = getattr(batcher.model.model, "config", None)
        self.longest: int | None = getattr(config, "longest", None)
        self.vocabulary: int | None = getattr(config, "vocabulary", None)

    @staticmethod
    def serves(batcher: Batcher) -> bool:
        """Whether a model reads tokens and has the output ``embedding``."""
        return "input_ids" in batcher.model.specs and "embedding" in getattr(batcher.model.model, "outputs", ())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [description(self.name, self.created)]})

    async def model(self, request: Request) -> Response:
        check_name(request.path_params["name"], self.name)
        return JSONResponse(description(self.name, self.created))

    async def embeddings(self, request: Request) -> Response:
        options = Fields(await parsed(await read_body(request, self.limits.body_bytes)), frozenset({"user"}))
        check_name(options.typed("model", str), self.name)
        encoding = options.typed("encoding_format", str, "float")
        if encoding not in ("float", "base64"):
            raise RequestError(
                400, f"encoding_format is {encoding[:40]!r}, expected float or base64", "encoding_format"
            )
        listed = listed_prompts(options.typed("input", (str, list)), "input")
        if len(listed) > TEXTS:
            raise RequestError(400, f"a request may have {TEXTS} texts, not {len(listed)}", "input")
        size = options.number("dimensions", None, 1, 1 << 20, int)
        options.finish({})
        texts = await asyncio.to_thread(lambda: [tokens_of(p, self.tokenizer, "input") for p in listed])
        self._check(texts)
        vectors = await self._vectors(texts)
        if size not in (None, vectors.shape[1]):
            raise RequestError(400, f"the vectors of this model have {vectors.shape[1]} dimensions", "dimensions")
        count = sum(map(len, texts))
        data = [
            {"object": "embedding", "index": n, "embedding": _encoded(vector, encoding)}
            for n, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": usage})

    def _check(self, texts: list[list[int]]) -> None:
        longest, token = max(map(len, texts)), max(map(max, texts))
        if self.longest is not None and longest > self.longest:
            raise RequestError(400, f"a text has {longest} tokens, and the model reads at most {self.longest}", "input")
        if self.vocabulary is not None and token >= self.vocabulary:
            raise RequestError(400, f"token {token} is out of range, the model has {self.vocabulary}", "input")

    async def _vectors(self, texts: list[list[int]]) -> np.ndarray[Any, Any]:
        """Return the vectors of texts, scaled to length 1; texts of one length are rows of a batch."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for n, text in enumerate(texts):
            by_length[self._length(text)].append(n)
        vectors: dict[int, np.ndarray[Any, Any]] = {}
        for length, places in by_length.items():
            for begin in range(0, len(places), self.limits.rows):
                rows = places[begin : begin + self.limits.rows]
                outputs = await self.batcher.run(self._inputs([texts[n] for n in rows], length))
                vectors |= zip(rows, outputs["embedding"].astype(np.float32), strict=True)
        stacked = np.stack([vectors[n] for n in range(len(texts))])
        norms = np.linalg.norm(stacked, axis=1, keepdims=True)
        return stacked / np.where(norms == 0, 1, norms)

    def _length(self, text: list[int]) -> int:
        """Return the length that a text is padded to: where each length is compiled, a power of two of at least 16."""
        if self.longest is None or not self.batcher.model.backend.capabilities.recompiles:
            return len(text)
        return min(max(16, 1 << (len(text) - 1).bit_length()), self.longest)

    def _inputs(self, texts: list[list[int]], length: int) -> dict[str, np.ndarray[Any, Any]]:
        tokens = np.zeros((len(texts), length), np.int32)
        mask = np.zeros_like(tokens)
        for row, text in enumerate(texts):
            tokens[row, : len(text)], mask[row, : len(text)] = text, 1
        return {"input_ids": tokens} if mask.all() else {"input_ids": tokens, "attention_mask": mask}


def _encoded(vector: np.ndarray[Any, Any], encoding: str) -> Any:
    return vector.tolist() if encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
