"""A conversation with a decoder: the tokens in its cache, and the next logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import numpy as np

from mithril.backend import CheckedType
from mithril.compiler import CompiledModel, Runner
from mithril.graph import InputError
from mithril_hub.encoder.network import Network
from mithril_hub.model import Decoder


class Source:
    """Sequences of tokens, whose lengths may differ, an array such as the spectra of Whisper, or arrays by input name.

    There is one row per text. ``repeats`` tells whether each call reads the arrays, not only the first one of a text.
    """

    def __init__(self, source: Any, terminals: Sequence[str]) -> None:
        self.repeats = isinstance(source, Mapping)
        if isinstance(source, Mapping):
            self.single, self.arrays = False, {name: np.asarray(x) for name, x in source.items()}
            self.name = next(iter(self.arrays), "")
            return
        self.name = next(n for n in ("input_ids", "input_features") if n in terminals)
        self.arrays = self._tokens(source) if self.name == "input_ids" else self._array(source)

    @property
    def rows(self) -> int:
        """The number of texts."""
        return len(self.arrays[self.name])

    def key(self, n: int) -> bytes:
        """Return the content of a row, which does not depend on the padding that the others require."""
        if self.repeats:
            return b"".join(x[n].tobytes() for x in self.arrays.values())
        array = self.arrays[self.name][n]
        mask = self.arrays.get("attention_mask")
        content: bytes = (array if mask is None else array[: int(mask[n].sum())]).tobytes()
        return content

    def selected(self, rows: Sequence[int]) -> Source:
        """Return the source of some texts."""
        other = copy(self)
        other.arrays = {k: a[list(rows)] for k, a in self.arrays.items()}
        return other

    def _array(self, source: Any) -> dict[str, Any]:
        array = np.asarray(source, np.float32)
        if array.ndim not in (2, 3):
            raise InputError(f"generate: source has rank {array.ndim}, expected [batch, bins, frames]")
        self.single = array.ndim == 2
        return {self.name: array[None] if self.single else array}

    def _tokens(self, source: Any) -> dict[str, Any]:
        rows = source.tolist() if isinstance(source, np.ndarray) else list(source)
        self.single = bool(rows) and all(isinstance(t, (int, np.integer)) for t in rows)
        batch = [rows] if self.single else [list(r) for r in rows]
        if not batch or not all(batch):
            raise InputError("generate: source has no tokens", hint="pass a list of tokens, or a list of such lists")
        longest = max(map(len, batch))
        tokens, mask = np.zeros((2, len(batch), longest), np.int32)
        for n, row in enumerate(batch):
            tokens[n, : len(row)], mask[n, : len(row)] = row, 1
        return {self.name: tokens, "attention_mask": mask}


Tokens = np.ndarray[Any, Any]
Arrays = Mapping[str, Any]
HANDLED = ("position", "length", "last")  # inputs to which a session passes numbers
KEYS = ("key_cache", "cache_key")  # ends of the names of states with keys
VALUES = ("value_cache", "cache_value")
COUNTS = ("position", "padding", "rng")  # states that no text depends on
LARGE, SMALL = 64, 8  # tokens of a step over a prompt: few programs serve prompts of every length
ONLY = 32  # the same, where the backend compiles each size for a long time: one program for prompts, one for steps
UNLIMITED = 1 << 30  # the capacity of a model without keys


class Session(metaclass=CheckedType):
    """A runner of a decoder with a cache, and the tokens whose keys and values the cache holds, per row."""

    argument_hints: ClassVar[Mapping[str, str]] = {
        "model": "compile it: ml.compile(ml.from_pretrained(folder, cache=1024), 'numpy', inference=True)"
    }

    def __init__(self, model: CompiledModel | Runner) -> None:
        self.runner = model.runner() if isinstance(model, CompiledModel) else model
        self.rows: list[list[int]] = []
        model = self.runner.model.model
        self.config = model.config if isinstance(model, Decoder) else None
        self.text = model.text if isinstance(model, Network) else self.config
        self.source: Source | None = None
        self.reads_source = False  # whether the next call begins a text with the input of the encoder
        self.tokens = ""
        self.counted = self.pads = False  # whether position and padding are states
        self.recurrent: list[str] = []  # states that later tokens do not overwrite
        specs = self.runner.model.specs
        if "position" in specs or len([n for n, spec in specs.items() if spec.required]) < 2:
            self._inspect({})  # others may have further inputs, whose arrays come with the prompt

    def _inspect(self, source: Arrays) -> None:
        """Find the input of the tokens, and the states by which the model continues a text."""
        specs = {name: spec for name, spec in self.runner.model.specs.items() if name not in source}
        tokens, required = token_input(specs), [n for n, spec in specs.items() if spec.required and n not in HANDLED]
        if tokens is None or (len(required) > 1 and "position" not in specs):
            unread = [name for name in required if name != tokens]
            raise InputError(
                "generate: no input of this model reads tokens" if tokens is None else "generate: inputs have no value",
                facts=[f"inputs: {', '.join(specs)}"],
                hint=f"generate(model, prompt, source={{'{unread[0]}': array}})"
                if unread
                else "declare the tokens: IOKey('tokens', dtype='int32'), or an Embedding that reads them",
            )
        self.tokens = tokens
        if "position" in specs:
            return
        sizes = [n if isinstance(n, int) else 1 for n in specs[tokens].shape or (1, 1)]
        first = {name: x[: sizes[0]] for name, x in source.items()}
        probe = Runner(self.runner.model, self.runner.params)
        states = probe.get_shapes({tokens: np.zeros(sizes, np.int32), **first})
        if "position" not in states:
            raise InputError(
                "this model has no cache, which generation requires",
                facts=[f"inputs: {', '.join(specs)}; states: {', '.join(states) or 'none'}"],
                hint="keep keys and values with self.cache(keys, values, length=1024) in the attention of your layers, "
                "MultiHeadAttention(cache=1024), or ml.from_pretrained(folder, cache=1024)",
            )
        self.counted, self.pads = True, "padding" in states
        self.recurrent = [n for n in states if n not in COUNTS and not n.endswith((*KEYS, *VALUES))]

    @property
    def is_recurrent(self) -> bool:
        """Whether the model cannot forget tokens that it has read."""
        return bool(self.recurrent)

    @property
    def backend(self) -> Any:
        """The backend of the model."""
        return self.runner.model.backend

    @property
    def capacity(self) -> int:
        """The number of positions in the cache."""
        rows = max(1, len(self.rows)) if self.source is None else self.source.rows
        shapes = self._shapes(rows).items()
        return min((shape[2] for name, shape in shapes if name.endswith(KEYS)), default=UNLIMITED)

    @property
    def encoder_capacity(self) -> int:
        """The number of tokens of an encoder's input in the cache."""
        rows = 1 if self.source is None else self.source.rows
        return next(shape[1] for name, shape in self._shapes(rows).items() if name.endswith("encoder_mask"))

    def _shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        return self.runner.get_shapes(self._inputs(np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32), [1] * rows))

    def reset(self) -> None:
        """Forget all tokens."""
        self.runner.reset()
        self.rows = []

    def attend(self, source: Any) -> None:
        """Set the input of the encoder, one row per text; the next prompts begin new texts."""
        self.reset()
        self.source = source if isinstance(source, Source) else Source(source, list(self.runner.model.specs))
        self.reads_source = True
        if self.source.repeats:
            self._inspect(self.source.arrays)
            return
        tokens = self.source.arrays.get("attention_mask")
        if tokens is not None and tokens.shape[1] > self.encoder_capacity:
            raise InputError(
                f"the encoder's cache holds {self.encoder_capacity} positions, and source has {tokens.shape[1]} tokens",
                hint=f"ml.from_pretrained(folder, cache={tokens.shape[1]}), or a shorter text",
            )

    def check_source(self, rows: int) -> None:
        """Raise InputError if inputs other than the tokens are missing, or have another number of rows."""
        if not self.tokens:
            self._inspect({})
        arrays = self.source.arrays if self.source is not None and self.source.repeats else {}
        for name, x in arrays.items():
            if x.shape[:1] != (rows,):
                raise InputError(
                    f"generate: source['{name}'] has the shape {list(x.shape)} for {rows} prompts",
                    hint=f"pass one row for each prompt: [{rows}, ...]",
                )

    def start(self, prompts: Sequence[Sequence[int]]) -> Any:
        """Read prompts and return the logits after each: [batch, 1, v]. Beginnings that the cache holds are reused.

        The last token of a prompt is always read again, as its logits are not in the cache.
        """
        if len(self.rows) != len(prompts):
            self.reset()
            self.rows = [[] for _ in prompts]
        common = [self._reused(old, new) for old, new in zip(self.rows, prompts, strict=True)]
        if self.is_recurrent and common != [len(row) for row in self.rows]:
            self.reset()
            common, self.rows = [0 for _ in prompts], [[] for _ in prompts]
        self.rows = [list(new[:n]) for new, n in zip(prompts, common, strict=True)]
        return self.extend([new[n:] for new, n in zip(prompts, common, strict=True)])

    def extend(self, rows: Sequence[Sequence[int]]) -> Any:
        """Read further tokens of each row, and return the logits after the last token of each row that has new ones."""
        self.check([len(r) for r in rows])
        # Keys in the cache are rotated for short texts: the whole text is read again with the rotation
        # of long ones.
        if self._crosses(rows):
            rows, self.rows = [old + list(new) for old, new in zip(self.rows, rows, strict=True)], [[] for _ in rows]
        ends = np.array([len(r) for r in rows])
        totals = [len(old) + len(new) for old, new in zip(self.rows, rows, strict=True)]
        if self.is_recurrent and not self.pads and len({int(n) for n in ends if n}) > 1:
            raise InputError(
                "generate: the recurrent layers of this model cannot read prompts of different lengths together",
                facts=[f"states: {', '.join(self.recurrent[:4])}"],
                hint="generate one text at a time, or pass lengths=self.token_counts(x) to the recurrent layers",
            )
        logits, offset = None, 0
        while offset < ends.max():
            piece, starts, counts = self._piece(rows, offset, int(ends.max()) - offset)
            inputs, last = self._inputs(piece, starts, totals), np.maximum(counts - 1, 0)
            selects = "last" in self.runner.model.specs
            if selects and piece.shape[1] > 1:
                inputs["last"] = last
            results = self._run(inputs, starts, counts)
            if not selects:
                results = self.backend.to_numpy(results)[np.arange(len(rows)), last][:, None]
            reads = (ends > offset)[:, None, None]  # other rows have ended before
            is_first = logits is None or reads.all()
            logits = results if is_first else np.where(reads, *map(self.backend.to_numpy, (results, logits)))
            offset += piece.shape[1]
        self.rows = [old + list(new) for old, new in zip(self.rows, rows, strict=True)]
        return logits

    @property
    def _reads_one(self) -> bool:
        """Whether the model was compiled for one token at a time."""
        shape = self.runner.model.specs[self.tokens].shape
        return shape is not None and shape[-1] == 1

    @property
    def short_limit(self) -> int:
        """The length up to which keys have another rotation than those of longer texts, or 0."""
        return self.config.short_limit if self.config is not None else 0

    @property
    def growing_limit(self) -> int:
        """The length beyond which each further token changes the rotation, or 0."""
        return self.config.growing_limit if self.config is not None else 0

    def _reused(self, old: Sequence[int], new: Sequence[int]) -> int:
        """Return the number of tokens whose keys and values remain: none if a new text has another rotation."""
        # Beyond this length each further token changes the rotation of all keys, so that none of the
        # cache is right.
        grows = 0 < self.growing_limit < max(len(old), len(new))
        if grows or len(new) <= self.short_limit < len(old):
            return 0
        return min(_shared(old, new), len(new) - 1)

    def _crosses(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether a sequence becomes so long that the keys and values in the cache count no more."""
        limit = self.short_limit
        return any(0 < len(old) <= limit < len(old) + len(new) for old, new in zip(self.rows, rows, strict=True))

    def _piece(self, rows: Sequence[Sequence[int]], offset: int, left: int) -> tuple[Tokens, Tokens, Tokens]:
        """Return tokens of one step, the position of the first in each row, and how many of them a row reads.

        A row is padded with zeros, which later tokens overwrite. A row that has ended repeats its last token, unless
        the model does not read padding.
        """
        capacity = self.capacity
        begins = [min(offset, len(row) - (not self.pads)) for row in rows]
        starts = np.array([len(old) + n for old, n in zip(self.rows, begins, strict=True)], np.int32)
        size = self._size(left)
        # Padding would be written beyond the end of the cache.
        if int(starts.max()) + size > capacity:
            size = 1
            starts = np.minimum(starts, capacity - 1)
        piece, counts = np.zeros((len(rows), size), np.int32), np.zeros(len(rows), np.int32)
        for b, (old, row, n) in enumerate(zip(self.rows, rows, begins, strict=True)):
            part = row[n : n + size] if n >= 0 else old[-1:]
            piece[b, : len(part)], counts[b] = part, len(part)
        return piece, starts, counts

    def _size(self, left: int) -> int:
        """Return how many tokens a step reads, if ``left`` tokens of a text are left."""
        if left == 1 or self._reads_one or (self.is_recurrent and not self.pads):
            return 1
        if self.backend.capabilities.recompiles:
            return ONLY
        # Three sizes are three programs; a piece of 64 that is more than half full costs less than
        # several of 8.
        return LARGE if left > LARGE // 2 else SMALL

    def _inputs(self, tokens: Tokens, starts: Tokens, totals: Sequence[int]) -> dict[str, Any]:
        """Return the inputs of a step: one position for all rows if they agree, else one per row."""
        inputs: dict[str, Any] = {self.tokens: tokens}
        if not self.counted:
            inputs["position"] = self._one_or_all("position", starts)
        if self.source is not None and self.source.repeats:
            inputs |= self.source.arrays
        if "length" in self.runner.model.specs:
            inputs["length"] = self._one_or_all("length", np.array(totals, np.int32))
        return inputs

    def _one_or_all(self, name: str, numbers: Tokens) -> Any:
        """Return the only number if all are equal, which takes a faster program, or as many as the input declares."""
        shape = self.runner.model.specs[name].shape
        rank = None if shape is None or ... in shape else len(shape)
        # Where programs take long to compile, rows have one program, whether their numbers are equal or not.
        are_equal = (numbers == numbers[0]).all() and (len(numbers) == 1 or not self.backend.capabilities.recompiles)
        if rank == 0 and not are_equal:
            raise InputError(
                f"rows of different lengths require a number for each in the input '{name}', which was compiled as one",
                hint=f"compile with shapes={{'{name}': [None]}}, or generate one row at a time",
            )
        return numbers[0] if rank == 0 or (rank is None and are_equal) else numbers

    def _run(self, inputs: dict[str, Any], starts: Tokens, counts: Tokens) -> Any:
        """Run a step, and return its only output, or that named ``logits``."""
        if self.source is not None and self.reads_source:
            inputs = {**inputs, **self.source.arrays}
            self.reads_source = False
        if self.counted:
            numbers = {"position": starts}
            if self.pads:
                numbers["padding"] = np.int32(inputs[self.tokens].shape[1]) - counts
            self.runner.set_state(inputs, numbers)
        results = self.runner(inputs)
        return results["logits"] if "logits" in results else next(iter(results.values()))

    def verify(self, rows: Sequence[Sequence[int]]) -> Any:
        """Read as many tokens in each row, and return the logits after every one: [batch, length, vocabulary]."""
        self.check([len(r) for r in rows])
        if len(rows[0]) == 1:
            return self.extend(rows)
        starts = np.array([len(r) for r in self.rows], np.int32)
        inputs = self._inputs(np.array(rows, np.int32), starts, [int(n) + len(rows[0]) for n in starts])
        logits = self._run(inputs, starts, np.full(len(rows), len(rows[0]), np.int32))
        self.rows = [old + list(new) for old, new in zip(self.rows, rows, strict=True)]
        return logits

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget the tokens of each row from a position: later tokens overwrite their keys and values."""
        self.rows = [row[:n] for row, n in zip(self.rows, lengths, strict=True)]

    def fork(self, rows: Sequence[int]) -> Session:
        """Return a session that continues these rows, in this order."""
        invalid = next((r for r in rows if not 0 <= r < len(self.rows)), None)
        if invalid is not None:
            raise InputError(f"there is no row {invalid} in a session of {len(self.rows)} rows")
        other = copy(self)
        other.runner, other.rows = self.runner.fork(rows), [list(self.rows[r]) for r in rows]
        other.source = None if self.source is None else self.source.selected(rows)
        return other

    @classmethod
    def joined(cls, parts: Sequence[tuple[Session, Sequence[int]]]) -> Session:
        """Return a session that continues rows of several sessions of one model, in this order."""
        other = copy(parts[0][0])
        other.runner = Runner.joined([(session.runner, rows) for session, rows in parts])
        other.rows = [list(session.rows[r]) for session, rows in parts for r in rows]
        return other

    def room(self, count: int) -> int:
        """Return how many tokens can be read together with the last one of a text of ``count`` tokens."""
        end = self.growing_limit or (self.short_limit if count <= self.short_limit + 1 else 0)
        return min(end or self.capacity, self.capacity) - count

    def check_length(self, prompt: int, new: int) -> None:
        """Raise InputError if the cache has no room for a prompt and its continuation; the last token is not read."""
        if prompt <= self.capacity < prompt + new - 1:
            raise InputError(
                f"the cache holds {self.capacity} positions, too few for a prompt of {prompt} and {new} new tokens",
                hint=f"max_new_tokens={self.capacity - prompt + 1}, or ml.from_pretrained(folder, "
                f"cache={prompt + new}), or a larger length of self.cache in layers of your own",
            )

    def check(self, counts: Sequence[int]) -> None:
        """Raise InputError if the cache has no room for ``counts`` more tokens in the rows."""
        length, count = max(((len(r), n) for r, n in zip(self.rows, counts, strict=True)), key=sum)
        if length + count > self.capacity:
            raise InputError(
                f"the cache holds {self.capacity} positions, and {length} + {count} are required",
                hint=f"ml.from_pretrained(folder, cache={length + count}), a larger length of self.cache in layers of "
                "your own, or a shorter prompt",
            )


def token_input(specs: Mapping[str, Any]) -> str | None:
    """Return the input that reads tokens: by its name in checkpoints, else the only integers that are required."""
    in_checkpoints = [name for name in ("decoder_input_ids", "input_ids") if name in specs]
    integers = [
        name
        for name, spec in specs.items()
        if spec.required and name != "position" and spec.dtype is not None and spec.dtype.is_integer
        if spec.shape is None or len(spec.shape) == 2
    ]
    return in_checkpoints[0] if in_checkpoints else integers[0] if len(integers) == 1 else None


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
