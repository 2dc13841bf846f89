"""Symbolic sizes of an exported program: a struct in C, checks, and an arena planned when the program runs.

Values that are never alive together share a room of the arena. The rooms are fixed, their bytes depend on the sizes:
C code computes them for every run, and the addresses of all values with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mithril.backend import ALIGNMENT, memory_plan, nbytes
from mithril.graph import Dim, Guard, InputError, Size, Symbol, UnsupportedError, Value, numel, symbols
from mithril_cbackend.c_names import unique
from mithril_cbackend.lowering.element.element_reader import TYPICAL
from mithril_cbackend.program.c_module import fields
from mithril_cbackend.program.program import Program

Multiply = Callable[[str, str], str]
EXAMPLES = 64  # the largest size tried for the test program
ROUNDED = """\
/* A quotient of sizes, rounded down, and its remainder; those of C are rounded towards zero. */
static inline int64_t NAME_quotient(int64_t a, int64_t b) { return a / b - (a % b < 0); }
static inline int64_t NAME_rest(int64_t a, int64_t b) { return a % b < 0 ? a % b + b : a % b; }
"""


class OpenSizes:
    """The sizes of a program by name in C, and its arena as rooms."""

    def __init__(self, program: Program, guards: Sequence[Guard], begin: int, name: str) -> None:
        self.program, self.guards, self.begin, self.name = program, guards, begin, name
        bounds: dict[str, tuple[int, int | None]] = {}
        for i in program.graph.inputs:
            for s in symbols(*i.type.shape):
                low, high = bounds.get(s.name, (0, None))
                highs = [n for n in (high, s.high) if n is not None]
                bounds[s.name] = max(low, s.low), min(highs, default=None)
        self.bounds = {name: bounds[name] for name in program.sizes}
        used = set[str]()
        self.names = {name: unique(name, used) for name in self.bounds}
        self.rooms = self._rooms()

    # -- in Python ------------------------------------------------------------------------------------------------
    @property
    def highest(self) -> dict[str, int] | None:
        """The upper bounds, or None if a size has none."""
        highest = {name: high for name, (_, high) in self.bounds.items() if high is not None}
        return highest if len(highest) == len(self.bounds) else None

    def examples(self, sizes: Mapping[str, int]) -> list[dict[str, int]]:
        """Return up to three allowed sizes for the test program: these, or typical ones, then small ones."""
        typical = {n: TYPICAL if high is None else min(TYPICAL, high) for n, (_, high) in self.bounds.items()}
        first = {n: sizes.get(n, max(x, self.bounds[n][0])) for n, x in typical.items()}
        candidates = [dict.fromkeys(self.bounds, k) for k in range(1, EXAMPLES + 1)]
        begin = next((x for x in (first, *({**x, **sizes} for x in candidates)) if self.allows(x)), None)
        if begin is None:
            raise InputError(
                "cannot export: no sizes are known that the model allows", hint="pass inputs= of such sizes"
            )
        examples = [begin]
        for x in ({n: k + 3 for n, k in begin.items()}, {n: k // 2 for n, k in begin.items()}, *candidates):
            if len(examples) < 3 and x not in examples and self.allows(x):
                examples.append(x)
        return examples

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Whether the sizes satisfy bounds and guards."""
        in_bounds = all(
            low <= sizes[n] and (high is None or sizes[n] <= high) for n, (low, high) in self.bounds.items()
        )
        return in_bounds and all(guard.holds(sizes) for guard in self.guards)

    def arena(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of the arena."""
        rooms = [max(nbytes(v.type, sizes) for v in room) for room in self.rooms]
        return max(self.begin + sum(-(-size // ALIGNMENT) * ALIGNMENT for size in rooms), ALIGNMENT)

    def _rooms(self) -> list[list[Value]]:
        """Assign each value to the first room in which it overlaps no other, large values first."""
        assert self.program.steps is not None
        typical = {n: high or max(low, TYPICAL) for n, (low, high) in self.bounds.items()}
        plan = memory_plan.plan(self.program.steps, "greedy", typical, views=lambda node: False)
        rooms: list[list[memory_plan.Buffer]] = []
        for buffer in sorted(plan.buffers, key=lambda b: -b.size):
            free = (r for r in rooms if all(b.end < buffer.start or buffer.end < b.start for b in r))
            room = next(free, None)
            if room is None:
                rooms.append([buffer])
            else:
                room.append(buffer)
        return [[v for b in room for v in b.values if v in self.program.places] for room in rooms]

    # -- in C -----------------------------------------------------------------------------------------------------
    def struct(self) -> list[str]:
        """Return the declaration of the sizes, and the functions that divide them."""
        rows = []
        for size, (low, high) in self.bounds.items():
            rows.append(
                f"  int32_t {self.names[size]}; /* {f'{low} to {high}' if high is not None else f'{low} or more'} */"
            )
        struct = ["/* The sizes of one run. */", "typedef struct {", *rows, f"}} {self.name}_sizes_t;", ""]
        return [*struct, ROUNDED.replace("NAME", self.name)]

    def count(self, shape: tuple[Size, ...], sizes: str) -> str:
        """Return the number of elements as an expression of a struct of sizes."""
        n = self.text(numel(shape), lambda s: f"(int64_t)({sizes}).{self.names[s.name]}", lambda a, b: f"{a} * {b}")
        return f"((size_t){n})"

    def text(self, size: Size, symbol: Callable[[Symbol], str], multiply: Multiply) -> str:
        """Return a polynomial of sizes as an expression."""
        if not isinstance(size, Dim):
            return str(size)
        total = ""
        for factors, coefficient in size.terms:
            texts = [self._factor(f, symbol, multiply) for f in factors]
            if abs(coefficient) != 1 or not texts:
                texts.insert(0, str(abs(coefficient)))
            term = texts[0]
            for text in texts[1:]:
                term = multiply(term, text)
            sign = "-" if coefficient < 0 else "+" if total else ""
            total = f"{total} {sign} {term}" if total else f"{sign}{term}"
        return f"({total})"

    def _factor(self, factor: Any, symbol: Callable[[Symbol], str], multiply: Multiply) -> str:
        if isinstance(factor, Symbol):
            return symbol(factor)
        left, right = (self.text(a, symbol, multiply) for a in factor.args)
        functions = {"floordiv": "quotient", "mod": "rest"}
        if factor.function not in functions:
            raise UnsupportedError(
                f"cannot export to C: a value has the size '{factor}'", hint="export a program with static shapes"
            )
        return f"{self.name}_{functions[factor.function]}({left}, {right})"

    def functions(self) -> list[str]:
        """Return the functions that check sizes, and compute the bytes of the arena and the addresses in it."""
        name, used = self.name, fields(self.program)

        def text(size: Size) -> str:
            return self.text(size, lambda s: f"(int64_t)sizes->{self.names[s.name]}", lambda a, b: f"times({a}, {b})")

        lines = []
        for size, (low, high) in self.bounds.items():
            c = f"sizes->{self.names[size]}"
            conditions = [f"{c} < {low}"] + ([f"{c} > {high}"] if high is not None else [])
            lines.append(f"  if ({' || '.join(conditions)}) return -1;")
        for guard in self.guards:
            a, b = text(guard.left), text(guard.right)
            broken = f"{a} == 0 || {b} % {a} != 0" if guard.relation == "divides" else f"!({a} {guard.relation} {b})"
            lines.append(f"  if ({broken}) return -1;")
        values = [v for k in self.program.kernels.values() for v in k.parameters if not v.type.is_static]
        counts = dict.fromkeys(text(numel(v.shape)) for v in values)
        lines += [f"  if (is_large({n})) return -1;" for n in counts]
        for room in self.rooms:
            rows = dict.fromkeys(f"times({v.dtype.itemsize}, {text(numel(v.shape))})" for v in room)
            lines += ["  room = 0;", *(f"  room = most(room, {row});" for row in rows)]
            places = [used[self.program.places[v]] for v in room]
            addresses = [f"    self->{f.name} = ({f.element} *)(self->arena + end);" for f in places]
            lines += ["  if (self != NULL) {", *addresses, "  }"] if addresses else []
            lines.append(f"  end += (room + {ALIGNMENT - 1}) / {ALIGNMENT} * {ALIGNMENT};")
        sizes = [f"    self->{used[slot].name} = sizes->{self.names[n]};" for n, slot in self.program.sizes.items()]
        return [
            "/* A product that does not overflow: large ones are 2**40, more than any valid number of bytes. */",
            "static int64_t times(int64_t a, int64_t b) {",
            "  const int64_t limit = INT64_C(1) << 40;",
            "  if (a < 0) return -times(-a, b);",
            "  if (b < 0) return -times(a, -b);",
            "  return a > 0 && b > limit / a ? limit : a * b;",
            "}",
            "",
            "static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }",
            "",
            "static bool is_large(int64_t elements) { return elements > INT32_MAX; }",
            "",
            "/* Return the bytes of the arena, -1 for invalid sizes; set sizes and addresses if self is not NULL. */",
            f"static int64_t arrange({name}_t *self, const {name}_sizes_t *sizes) {{",
            f"  int64_t end = {self.begin}, room = 0;",
            *lines,
            "  if (self != NULL) {",
            *sizes,
            "  }",
            f"  return most(end, {ALIGNMENT});",
            "}",
            "",
            f"size_t {name}_arena_size(const {name}_sizes_t *sizes) {{",
            "  const int64_t bytes = sizes == NULL ? -1 : arrange(NULL, sizes);",
            "  const size_t size = (size_t)bytes;",
            "  return bytes < 0 || (int64_t)size != bytes ? 0 : size;",
            "}",
            "",
        ]

    def run_lines(self, up: str) -> list[str]:
        """Return the lines of the run that check the sizes and plan the arena."""
        return [
            f"  const size_t needed = {self.name}_arena_size(sizes);",
            f"  if (needed == 0) return {up}_SIZES;",
            f"  if (needed > self->arena_bytes) return {up}_SMALL;",
            "  arrange(self, sizes);",
        ]
