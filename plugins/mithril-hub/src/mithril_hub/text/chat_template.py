"""Chat templates: Jinja text of a checkpoint, run in a sandbox that reads its variables and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mithril.base import InputError


def rendered(template: str, values: Mapping[str, Any]) -> str:
    """Return the text of a conversation."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template).render(**values)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise InputError("the chat template fails", facts=[f"{type(error).__name__}: {str(error)[:300]}"]) from None


def _json(value: Any, indent: int | None = None) -> str:
    """Write JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
