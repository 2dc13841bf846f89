"""``ml.Tokenizer``: the tokenizer of a checkpoint, by the package ``tokenizers``."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import GeneratorType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mithril.backend import checked
from mithril.graph import InputError, UnsupportedError, check_limit, limit, parsed_json
from mithril.system import files
from mithril_gguf.vocabulary import PREFIX, TEMPLATE, read_entries, tokenizer_json
from mithril_hub.checkpoint.folder import locate, read_json, read_text

FAILURES = (
    *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError),
    *(MemoryError, SyntaxError, NotImplementedError, RuntimeError),
)
PER_CHARACTER = 64  # further steps for each character of the conversation, and characters of a template per step
CALL = 10  # steps of each iteration, call and filter
WORD = 30  # bits of a digit of Python's integers
CONTAINERS = (dict, list, tuple, set, frozenset)
# Functions whose results grow with the product of their arguments, where numbers count by value.
GROWING = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "join", "indent", "wordwrap"}
GROWING |= {"batch", "slice", "round", "sum", "truncate", "filesizeformat", "now", "translate"}
# Filters that do not read the content of elements.
SHALLOW = {"length", "count", "first", "last", "list", "reverse", "map", "select", "reject", "selectattr", "rejectattr"}
SHALLOW |= {"items", "default", "d", "attr"}
READING = {"raise_exception", "format", "format_map"}  # other functions that read it


def rendered(template: str, values: Mapping[str, Any]) -> str:
    """Return the text of a conversation."""
    check_limit("steps", 8 * len(template), f"the chat template has {len(template)} characters")
    try:
        environment = _Environment(PER_CHARACTER * _size(dict(values), math.inf))
        code = environment.compile(_counted(environment.parse(template)))
        text = environment.template_class.from_code(environment, code, environment.globals).render(**values)
        text.encode("utf-8")  # raises for a lone surrogate, which no tokenizer reads
        return text
    except InputError:
        raise
    except FAILURES as error:
        raise InputError("the chat template fails", facts=[f"{type(error).__name__}: {str(error)[:300]}"]) from None


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that counts the steps of one template."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, more: int) -> None:
        options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [loopcontrols], "optimized": False}
        super().__init__(**options, finalize=self.sized, cache_size=0)
        self.left: float = limit("steps") + more
        self.filters["tojson"] = _json
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _now}
        self.filters |= {name: self._counting(name, function) for name, function in self.filters.items()}
        self.tests |= {name: self._counting("string", function) for name, function in self.tests.items()}

    def step(self, cost: float = 1) -> None:
        """Count a step; raise InputError if none is left."""
        self.left -= cost
        if self.left < 0:
            check_limit("steps", limit("steps") + 1, "the chat template takes more steps")

    def sized(self, value: Any) -> Any:
        """Count the content of a value and return it."""
        self.step(1 + _size(value, self.left))
        return value

    def length_counted(self, value: Any) -> Any:
        """Count the elements of a value and return it."""
        self.step(1 + _size(value, 0))
        return value

    def concatenated(self, *values: Any) -> str:
        """Return the texts of values after each other."""
        return "".join([str(self.sized(value)) for value in values])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.step(_operation_cost(operator, left, right, self.left))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **options: Any) -> Any:  # as in Jinja
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps str.format
        bound = (owner,) if isinstance(owner, (str, bytes, *CONTAINERS)) else ()
        args = tuple(map(_complete, args))
        name = getattr(__obj, "__name__", "").removeprefix("_")
        __self._count(name, (*bound, *args, *options.values()), reads=name in READING)
        return super().call(__context, __obj, *args, **options)

    def _counting(self, name: str, function: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def counting(*args: Any, **options: Any) -> Any:
            args = tuple(map(_complete, args))
            self._count(name, (*args, *options.values()), reads=name not in SHALLOW)
            return function(*args, **options)

        return counting

    def _count(self, name: str, values: tuple[Any, ...], *, reads: bool) -> None:
        sizes = [_size(x, self.left if reads else 0) for x in values]
        if name == "replace" and len(sizes) > 2:
            text, old, new = sizes[-3:]
            self.step(CALL + text + (text + 1) // max(1, old) * new)
        elif name in GROWING:
            numbers = [abs(x) if isinstance(x, int) else _widths(x) for x in values]
            self.step(CALL + math.prod(1 + size + number for size, number in zip(sizes, numbers, strict=True)))
        elif name == "tojson" and any(isinstance(x, int) and x > 16 for x in values[1:]):
            raise TemplateError("tojson indents by more than 16")
        else:
            self.step(CALL + sum(sizes))


def _complete(value: Any) -> Any:
    """Return the elements that a filter yields as a list, whose size is known."""
    return list(value) if isinstance(value, GeneratorType) else value


def _size(value: Any, bound: float) -> int:
    """Return the number of characters and elements in a value; stop counting inside of containers at ``bound``."""
    total, pending = 0, [value]
    while pending:
        x = pending.pop()
        if isinstance(x, (str, bytes, range)):
            total += len(x)
        elif isinstance(x, int):
            total += x.bit_length() // WORD
        elif isinstance(x, CONTAINERS):
            total += len(x)
            if total <= bound:
                pending += [*x, *x.values()] if isinstance(x, dict) else x
    return total


def _widths(value: Any) -> int:
    """Return the sum of the numbers in a format."""
    return sum(int(n[:12]) for n in re.findall(r"\d+", value)) if isinstance(value, str) else 0


def _operation_cost(operator: str, left: Any, right: Any, bound: float) -> float:
    """Return the size of the result of an operation, at most; for integers, the work."""
    bound = bound if operator == "%" else 0
    sizes = _size(left, bound), _size(right, bound)
    numbers = isinstance(left, int), isinstance(right, int)
    if all(numbers):
        digits = 1 + sizes[0] + (abs(right) if operator == "**" and abs(left) > 1 else 0)
        return 1 + digits * (digits if operator == "**" else 1 + sizes[1])
    if operator == "*" and any(numbers):
        copies, size = (left, sizes[1]) if numbers[0] else (right, sizes[0])
        return 1 + int(max(0, copies)) * size
    if operator == "%" and isinstance(left, str):
        width = max([0, *(abs(x) for x in (right if isinstance(right, tuple) else (right,)) if isinstance(x, int))])
        return 1 + sum(sizes) + _widths(left) + (left.count("*") * width)
    return 1 + sum(sizes)


def _counted(template: nodes.Template) -> nodes.Template:
    """Return the syntax tree with a step in each iteration, and joined and compared values counted."""

    def call(name: str, *arguments: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)

    for loop in template.find_all(nodes.For):
        loop.body.insert(0, nodes.ExprStmt(call("step")))
    for compare in list(template.find_all(nodes.Compare)):
        compare.expr = call("sized", compare.expr)
        for operand in compare.ops:
            operand.expr = call("sized", operand.expr)
    pending: list[nodes.Node] = [template]
    while pending:
        node = pending.pop()
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, field, _joined(value, call))
            elif isinstance(value, list):
                setattr(node, field, [_joined(x, call) if isinstance(x, nodes.Node) else x for x in value])
        pending += node.iter_child_nodes()
    return template


def _joined(node: nodes.Node, call: Callable[..., nodes.Call]) -> nodes.Node:
    """Return a concatenation as a call that counts, and a slice with its content counted."""
    if isinstance(node, nodes.Concat):
        return call("concatenated", *node.nodes)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node.node = call("length_counted", node.node)
    return node


def _json(value: Any, indent: int | None = None) -> str:
    """Write JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _check_pieces(content: str, file: str) -> None:
    """Refuse long pieces: the library frees a Unigram model by a recursion per byte, which overflows the stack."""
    if '"Unigram"' not in content:
        return
    model = parsed_json(content, file)
    entries = model["model"].get("vocab") if isinstance(model, dict) and isinstance(model.get("model"), dict) else None
    pieces = [e[0] for e in entries if isinstance(e, list) and e] if isinstance(entries, list) else []
    longest = max((len(piece) for piece in pieces if isinstance(piece, str)), default=0)
    check_limit("piece", longest, f"a piece of the tokenizer {file} has {longest:,} characters")


class Tokenizer:
    """Text to tokens and back, as ``tokenizer.json`` of a folder or repository, or a GGUF file, defines it."""

    @checked()
    def __init__(self, source: str | os.PathLike[str], *, revision: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise UnsupportedError(
                "text requires the package tokenizers, which is not installed",
                hint="pip install 'mithril-hub[text]', or pass numbers of tokens",
            ) from None
        path = Path(source)
        self.folder = path
        if path.suffix == ".gguf":
            self.settings, content = _of_gguf(path)
        else:
            self.folder = locate(source, revision)
            path = files.inside(self.folder, "tokenizer.json")
            if not path.is_file():
                raise InputError(
                    f"'{self.folder}' has no tokenizer.json", hint="pass numbers of tokens in place of text"
                )
            content = read_text(self.folder, "tokenizer.json")
            self.settings = _optional(self.folder, "tokenizer_config.json")
        _check_pieces(content, f"'{path}'")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except BaseException as error:  # the library raises plain exceptions, and a panic of Rust is a BaseException
            if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
                raise
            raise InputError(f"'{path}' is not a readable tokenizer", facts=[str(error)[:200]]) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text; ``special`` adds those that begin or end a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, without special tokens unless ``special`` is set."""
        return str(self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=not special))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = True, **values: Any) -> list[int]:
        """Return the tokens of a conversation in the form that the checkpoint was trained with.

        Messages have a ``role`` and a ``content``. With ``prompt``, the result ends where an answer begins; ``values``
        are further variables of the template.
        """
        template = self.template
        if template is None:
            raise InputError(f"'{self.folder}' has no chat template", hint="encode(text)")
        tokens = {name: self._special(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        space = {**tokens, "messages": list(messages), "add_generation_prompt": prompt, **values}
        return self.encode(rendered(template, space), special=False)

    @property
    def template(self) -> str | None:
        """The chat template of the checkpoint."""
        template: Any = self.settings.get("chat_template")
        if (self.folder / "chat_template.jinja").is_file():
            template = read_text(self.folder, "chat_template.jinja")
        if isinstance(template, list):  # several templates by name
            template = next(
                (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
            )
        return template if isinstance(template, str) else None

    def _special(self, name: str) -> str:
        token = self.settings.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        return token if isinstance(token, str) else ""


def _of_gguf(path: Path) -> tuple[dict[str, Any], str]:
    """Return the settings and the tokenizer of a GGUF file."""
    entries = read_entries(path)
    content = tokenizer_json(entries, path)
    tokens = entries[f"{PREFIX}tokens"]
    settings: dict[str, Any] = {"chat_template": entries.get(TEMPLATE)}
    for key in ("bos", "eos"):
        n = entries.get(f"{PREFIX}{key}_token_id")
        if isinstance(n, int) and 0 <= n < len(tokens):
            settings[f"{key}_token"] = tokens[n]
    return settings, content


def _optional(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}
