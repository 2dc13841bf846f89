"""Python errors of the readers of files, reported as damage of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mithril.graph import InputError, MithrilError

# Files of other tools are input: an error of Python or NumPy at a malformed part is an error of the file. Deep nesting
# and huge counts end in the last two. Other exceptions, such as KeyboardInterrupt, pass.
MISTAKES: tuple[type[Exception], ...] = (
    *(TypeError, ValueError, IndexError, KeyError, AttributeError, ArithmeticError, AssertionError, StopIteration),
    *(RecursionError, MemoryError),
)


@contextmanager
def damage(name: str, kind: str, check: str) -> Iterator[None]:
    """Report Python errors in the block as damage of a file; ``check`` is a call of the format's own reader."""
    try:
        yield
    except MithrilError:
        raise
    except MISTAKES as cause:
        raise InputError(
            f"'{name}' is not a valid {kind}",
            facts=[f"{type(cause).__name__}: {cause}"],
            hint=f"check the file: {check}",
        ) from cause
