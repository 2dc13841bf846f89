"""The server of one model: its routes, health, metrics, and shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mithril.compiler import CompiledModel
from mithril.graph import InputError, MithrilError
from mithril_serve.batcher import Batcher
from mithril_serve.embeddings_api import Embeddings
from mithril_serve.engine import Engine
from mithril_serve.inference_api import Inference
from mithril_serve.limits import Limits, RequestError
from mithril_serve.openai_api import OpenAI, error_content

log = logging.getLogger("mithril.serve")


def serve(
    model: CompiledModel,
    *,
    name: str = "model",
    tokenizer: Any = None,
    stop: Sequence[int] | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
) -> None:
    """Serve a compiled model over HTTP until SIGINT or SIGTERM; see ``application``."""
    limits = limits or Limits()
    run(application(model, name=name, tokenizer=tokenizer, stop=stop, limits=limits), host, port, limits)


def run(app: ASGIApp, host: str, port: int, limits: Limits) -> None:
    """Serve an application until SIGINT or SIGTERM; requests in progress have five seconds to end."""
    config = uvicorn.Config(
        *(app, host, port),
        log_level="warning",
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=1 << 16,
        http="h11",
        ws="none",
    )
    uvicorn.Server(config).run()


def application(
    model: CompiledModel,
    *,
    name: str = "model",
    tokenizer: Any = None,
    stop: Sequence[int] | None = None,
    limits: Limits | None = None,
) -> ASGIApp:
    """Return the ASGI application of a model.

    A model that continues texts (``ml.generate``) has the interface of OpenAI, with the texts of ``tokenizer`` or with
    numbers of tokens; ``stop`` lists the tokens that end a text, by default those of the checkpoint. Any other model
    has the Open Inference Protocol, and ``/v1/embeddings`` if it reads ``input_ids`` and has the output ``embedding``.
    """
    limits = limits or Limits()
    try:
        engine = Engine(model, rows=limits.rows, queue=limits.queue)
    except InputError:  # it reads no tokens, or does not keep them
        batcher = Batcher(model, rows=limits.rows, queue=limits.queue)
        routes = Inference(batcher, name, limits).routes()
        if Embeddings.serves(batcher):
            routes += Embeddings(batcher, name, tokenizer, limits).routes()
        return _application(batcher, routes, limits)
    if stop is None:
        stop = engine.reader.text.stop if engine.reader.text is not None else ()
    return _application(engine, OpenAI(engine, name, tokenizer, limits, stop).routes(), limits)


def _application(worker: Engine | Batcher, routes: Sequence[Route], limits: Limits) -> ASGIApp:
    statuses: Counter[int] = Counter()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.close)

    async def healthy(request: Request) -> Response:
        return JSONResponse({"live": True, "ready": True})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(_metrics(worker, statuses), media_type="text/plain; version=0.0.4")

    health = [Route(path, healthy) for path in ("/health", "/v2/health/live", "/v2/health/ready")]
    app = Starlette(
        routes=[*routes, *health, Route("/metrics", metrics)],
        lifespan=lifespan,
        exception_handlers={
            RequestError: _request_error,
            MithrilError: _model_error,
            HTTPException: _http_error,
            Exception: _failure,
        },
    )
    return Timed(app, limits.seconds, statuses)


def _metrics(worker: Engine | Batcher, statuses: Counter[int]) -> str:
    """Return the metrics in the text form of Prometheus."""
    if isinstance(worker, Engine):
        values = {
            "generated_tokens_total": worker.tokens,
            "prompt_tokens_total": worker.read,
            "steps_total": worker.steps,
            "active_texts": worker.active,
            "waiting_texts": len(worker.waiting),
        }
    else:
        values = {
            "batches_total": worker.batches,
            "calls_total": worker.calls,
            "waiting_calls": len(worker.waiting),
        }
    lines = [
        f"# TYPE mithril_{n} {'counter' if n.endswith('total') else 'gauge'}\nmithril_{n} {v}"
        for n, v in values.items()
    ]
    lines.append("# TYPE mithril_requests_total counter")
    lines += [f'mithril_requests_total{{status="{status}"}} {count}' for status, count in sorted(statuses.items())]
    return "\n".join(lines) + "\n"


class Timed:
    """Ends requests that take too long, also if the client sends or reads slowly, and counts the statuses."""

    def __init__(self, app: ASGIApp, seconds: float, statuses: Counter[int]) -> None:
        self.app, self.seconds, self.statuses = app, seconds, statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def counting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self.statuses[message["status"]] += 1
            await send(message)

        try:
            async with asyncio.timeout(self.seconds):
                await self.app(scope, receive, counting)
        except TimeoutError:
            if begun:  # the connection closes before the end of the response
                log.warning("a request took more than %g seconds", self.seconds)
                return
            message = f"the request took more than {self.seconds:g} seconds"
            await JSONResponse(error_content(408, message), 408)(scope, receive, counting)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSONResponse(_content(request, error.status, error.message, error.field), error.status, headers=headers)


async def _model_error(request: Request, error: Exception) -> Response:
    status = 400 if isinstance(error, InputError) else 500
    return JSONResponse(_content(request, status, str(error)), status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(_content(request, error.status_code, error.detail), error.status_code, headers=error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    log.exception("a request failed", exc_info=error)
    return JSONResponse(_content(request, 500, "the server failed; its log has the reason"), 500)


def _content(request: Request, status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """Return an error in the form of the interface that the request uses."""
    return {"error": message} if request.url.path.startswith("/v2") else error_content(status, message, field)
