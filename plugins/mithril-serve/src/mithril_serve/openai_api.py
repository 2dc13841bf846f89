"""The HTTP interface of OpenAI: completions, chat completions and models."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mithril.graph import InputError, MithrilError
from mithril_hub.generation.sampling import Sampling
from mithril_serve.engine import Engine, Job, check_prompt
from mithril_serve.limits import Fields, Limits, RequestError, parsed, read_body
from mithril_serve.prompts import check_name, description, listed_prompts, tokens_of
from mithril_serve.text import Text

IGNORED = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
WITHOUT_EFFECT: Mapping[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
DEFAULT, LONGEST = 16, 4096  # tokens of completions and of chat answers without max_tokens
STOPS = 16  # stop strings of a request
STOP_LENGTH = 256
KINDS = {400: "invalid_request_error", 404: "invalid_request_error", 413: "invalid_request_error"}


@dataclass
class Event:
    """A change of a text: a piece, the token of it, or the reason of its end."""

    index: int
    piece: str = ""
    token: int | None = None
    reason: str | None = None
    error: BaseException | None = None


class Generation:
    """The texts of one request."""

    def __init__(
        self, api: OpenAI, request: Request, prompts: Sequence[Sequence[int]], options: Fields, longest: int
    ) -> None:
        self.request, self.engine = request, api.engine
        self.usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": 0}
        count = options.number("n", 1, 1, api.limits.rows, int)
        limit = options.number("max_tokens", None, 1, 1 << 30, int)
        limit = options.number("max_completion_tokens", limit, 1, 1 << 30, int)
        if limit is None:
            limit = max(1, min(longest, self.engine.capacity - max(map(len, prompts))))
        sampling = _sampling(options)
        seed = options.number("seed", secrets.randbits(63), -(1 << 63), (1 << 63) - 1, int)
        stops = _stops(options, api.tokenizer is not None)
        self.streams = bool(options.typed("stream", bool, False))
        shown = options.typed("stream_options", dict, {})
        self.shows_usage = bool(shown.get("include_usage"))
        options.finish(WITHOUT_EFFECT)
        for prompt in prompts:
            check_prompt(self.engine, prompt, limit)
        decode = None if api.tokenizer is None else api.tokenizer.decode
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.jobs = [
            Job(prompt, limit, self._emitter(k * count + n, Text(decode, stops)), sampling, seed, n, api.stop)
            for k, prompt in enumerate(prompts)
            for n in range(count)
        ]

    def _emitter(self, index: int, text: Text) -> Any:
        """Return the function by which the thread of the engine reports the tokens of a text."""

        def emit(token: int | None, reason: str | BaseException) -> bool:
            ended = False
            if isinstance(reason, BaseException):
                event = Event(index, error=reason)
            elif token is None:
                event = Event(index, text.flush(), reason=reason)
            else:
                piece, ended = text.push(token)
                event = Event(index, piece, token, "stop" if ended else None)
            try:
                self.loop.call_soon_threadsafe(self.events.put_nowait, event)
            except RuntimeError:  # the loop of a server that shut down
                return True
            return ended

        return emit

    async def results(self) -> AsyncIterator[Event]:
        """Yield the changes of the texts until all have ended. They end if the reader stops before."""
        open_ = len(self.jobs)
        try:
            self.engine.submit(self.jobs)
            while open_:
                event = await self.events.get()
                if event.error is not None:
                    raise event.error
                self.usage["completion_tokens"] += event.token is not None
                open_ -= event.reason is not None
                yield event
        finally:
            for job in self.jobs:
                job.cancelled = True

    def usage_total(self) -> dict[str, int]:
        return {**self.usage, "total_tokens": sum(self.usage.values())}


class OpenAI:
    """The routes of a language model."""

    def __init__(self, engine: Engine, name: str, tokenizer: Any, limits: Limits, stop: Sequence[int]) -> None:
        self.engine, self.name, self.tokenizer, self.limits = engine, name, tokenizer, limits
        self.stop, self.created = frozenset(stop), int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [description(self.name, self.created)]})

    async def model(self, request: Request) -> Response:
        check_name(request.path_params["name"], self.name)
        return JSONResponse(description(self.name, self.created))

    async def completions(self, request: Request) -> Response:
        options = await self._options(request)
        listed = listed_prompts(options.typed("prompt", (str, list)), "prompt")
        prompts = await asyncio.to_thread(lambda: [tokens_of(p, self.tokenizer, "prompt") for p in listed])
        generation = Generation(self, request, prompts, options, DEFAULT)
        base = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion"}
        return await self._answer(generation, base, _completion, _completion)

    async def chat(self, request: Request) -> Response:
        options = await self._options(request)
        messages = [_message(m) for m in options.typed("messages", list) or []]
        if not messages:
            raise RequestError(400, "messages is empty", "messages")
        if self.tokenizer is None or self.tokenizer.template is None:
            raise RequestError(400, "the model has no chat template: use /v1/completions")
        prompt = await asyncio.to_thread(self.tokenizer.chat, messages)
        generation = Generation(self, request, [prompt], options, LONGEST)
        base = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion"}
        return await self._answer(generation, base, _chat_message, _chat_delta)

    # -- requests ----------------------------------------------------------------------------------------------------
    async def _options(self, request: Request) -> Fields:
        options = Fields(await parsed(await read_body(request, self.limits.body_bytes)), IGNORED)
        check_name(options.typed("model", str), self.name)
        return options

    # -- answers -----------------------------------------------------------------------------------------------------
    async def _answer(self, generation: Generation, base: dict[str, Any], complete: Any, part: Any) -> Response:
        base |= {"created": int(time.time()), "model": self.name}
        if generation.streams:
            if base["object"] == "chat.completion":
                base["object"] = "chat.completion.chunk"
            results = generation.results()
            first = await anext(results)  # errors before the first token have a status
            return StreamingResponse(_stream(generation, first, results, base, part), media_type="text/event-stream")
        texts: dict[int, list[Event]] = {k: [] for k in range(len(generation.jobs))}
        collecting = asyncio.ensure_future(_collected(generation, texts))
        leaving = asyncio.ensure_future(_left(generation.request))
        try:
            await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise RequestError(400, "the client left")
            await collecting
        finally:
            for task in (collecting, leaving):
                task.cancel()
            for job in generation.jobs:
                job.cancelled = True
        choices = [complete(k, events, is_first=True) for k, events in texts.items()]
        return JSONResponse({**base, "choices": choices, "usage": generation.usage_total()})


async def _collected(generation: Generation, texts: dict[int, list[Event]]) -> None:
    async for event in generation.results():
        texts[event.index].append(event)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(
    generation: Generation, first: Event, results: AsyncIterator[Event], base: dict[str, Any], part: Any
) -> AsyncIterator[str]:
    def data(content: Any) -> str:
        return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"

    begun: set[int] = set()
    try:
        event: Event | None = first
        while event is not None:
            yield data({**base, "choices": [part(event.index, [event], is_first=event.index not in begun)]})
            begun.add(event.index)
            event = await anext(results, None)
        if generation.shows_usage:
            yield data({**base, "choices": [], "usage": generation.usage_total()})
        yield "data: [DONE]\n\n"
    except (MithrilError, RequestError) as error:
        yield data(error_content(500, str(error)))
    finally:
        await results.aclose()  # type: ignore[attr-defined]


def _completion(index: int, events: Sequence[Event], *, is_first: bool) -> dict[str, Any]:
    return {"index": index, "text": _text(events), "logprobs": None, **_end(events)}


def _chat_message(index: int, events: Sequence[Event], *, is_first: bool) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": _text(events)},
        "logprobs": None,
        **_end(events),
    }


def _chat_delta(index: int, events: Sequence[Event], *, is_first: bool) -> dict[str, Any]:
    role = {"role": "assistant"} if is_first else {}
    return {"index": index, "delta": {**role, "content": _text(events)}, "logprobs": None, **_end(events)}


def _text(events: Sequence[Event]) -> str:
    return "".join(event.piece for event in events)


def _end(events: Sequence[Event]) -> dict[str, Any]:
    """Return the reason of the end, and the numbers of the tokens, for models without a tokenizer."""
    return {"finish_reason": events[-1].reason, "token_ids": [e.token for e in events if e.token is not None]}


def error_content(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """Return the content of an error."""
    kind = "rate_limit_error" if status == 429 else KINDS.get(status, "server_error")
    code = "model_not_found" if status == 404 and field == "model" else None
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def _message(message: Any) -> dict[str, Any]:
    """Return a message with its parts of text joined."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(400, "a message is an object with role and content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise RequestError(400, "the model reads parts of type text only", "messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(400, "the content of a message is a text", "messages")
    return {**message, "content": content}


def _sampling(options: Fields) -> Sampling:
    """Return how tokens are drawn; as in OpenAI's interface the temperature is 1 by default."""
    temperature = options.number("temperature", 1.0, 0, 100)
    top_p, top_k = options.number("top_p", 1.0, 0, 1), options.number("top_k", None, 1, 1 << 30, int)
    min_p, penalty = options.number("min_p", None, 0, 1), options.number("repetition_penalty", 1.0, 0.01, 100)
    if temperature == 0:
        return Sampling(repetition_penalty=penalty)
    try:
        return Sampling(temperature, top_k, None if top_p == 1 else top_p, min_p, penalty)
    except InputError as error:
        raise RequestError(400, str(error)) from None


def _stops(options: Fields, has_text: bool) -> list[str]:
    stops = options.typed("stop", (str, list), [])
    stops = [stops] if isinstance(stops, str) else stops
    if len(stops) > STOPS or not all(isinstance(s, str) and 0 < len(s) <= STOP_LENGTH for s in stops):
        raise RequestError(400, f"stop is a text or up to {STOPS}, each of 1 to {STOP_LENGTH} characters", "stop")
    if stops and not has_text:
        raise RequestError(400, "the model has no tokenizer, so that no text can stop it", "stop")
    return list(stops)
