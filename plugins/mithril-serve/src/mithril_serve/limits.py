"""Limits of requests, and the errors of those beyond them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from mithril.graph import MithrilError

log = logging.getLogger("mithril.serve")


@dataclass(frozen=True)
class Limits:
    """The bounds of one request."""

    body_bytes: int = 64 << 20
    seconds: float = 300.0  # from the first byte to the last, also of clients that send or read slowly
    rows: int = 8  # texts that are generated at once, and largest batch of other models
    queue: int = 64  # texts and requests that wait
    connections: int = 256


class RequestError(Exception):
    """A request that is answered by an error: status, message, and the field that it is about."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field


class Busy(RequestError):
    """Too many requests wait."""

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(429, f"{waiting} requests wait already, and at most {limit} may")


class Closing(RequestError):
    """The server shuts down."""

    def __init__(self) -> None:
        super().__init__(503, "the server shuts down")


def answerable(error: Exception) -> Exception:
    """Return the error that a request is answered with; others than ours are logged, and a client reads none of them.

    An exception without a handler would also end the connection, and with it the next request of the client.
    """
    if isinstance(error, MithrilError | RequestError):
        return error
    log.error("a model failed", exc_info=error)
    return RequestError(500, "the server failed; its log has the reason")


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request; raise RequestError if it is too large."""
    length = request.headers.get("content-length", "")
    too_large = RequestError(413, f"the body of a request may have {limit} bytes")
    if length.isdigit() and int(length) > limit:
        raise too_large
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            chunks.append(chunk)
    except ClientDisconnect:
        raise RequestError(400, "the client left") from None
    return b"".join(chunks)


async def parsed(body: bytes) -> dict[str, Any]:
    """Return a JSON object; raise RequestError for any other content."""
    try:
        # a large body is parsed in a thread, so that other requests continue
        content = await asyncio.to_thread(json.loads, body) if len(body) > 1 << 16 else json.loads(body)
    except RecursionError:
        raise RequestError(400, "the JSON of the request is nested too deeply") from None
    except ValueError as error:
        raise RequestError(400, f"the body of the request is not JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise RequestError(400, f"the body of the request is not a JSON object, but {type(content).__name__}")
    return content


class Fields:
    """The fields of a JSON object, read once each; ``finish`` rejects the others."""

    def __init__(self, content: Mapping[str, Any], ignored: frozenset[str] = frozenset()) -> None:
        self.content = {name: value for name, value in content.items() if value is not None and name not in ignored}

    def number(self, name: str, default: Any, low: float, high: float, kind: type = float) -> Any:
        """Return a number of a range."""
        value = self.content.pop(name, default)
        if value is None:
            return None
        is_kind = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
        if not is_kind or not low <= value <= high:
            raise RequestError(400, f"{name} is {str(value)[:40]}, expected a number from {low} to {high}", name)
        return kind(value)

    def typed(self, name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a field of some types."""
        value = self.content.pop(name, default)
        if value is not default and not isinstance(value, kinds):
            names = " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
            raise RequestError(400, f"{name} is {type(value).__name__}, expected {names}", name)
        return value

    def finish(self, accepted: Mapping[str, Any]) -> None:
        """Raise RequestError for fields that are not supported, unless they have the value of no effect."""
        for name, value in self.content.items():
            if name not in accepted or value != accepted[name]:
                raise RequestError(400, f"the field {name[:80]!r} is not supported with this value", name[:80])
