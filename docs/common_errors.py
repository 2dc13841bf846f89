"""The mistakes of docs/errors.md and the errors that they raise: ``python docs/common_errors.py`` rewrites the page.

Each block of the page after the prelude is run by itself in a scratch directory; the block of text after it is the
complete error. A test compares the page with its regeneration, so the page shows the texts that users see.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("errors.md")
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def regenerated(page: str) -> str:
    """Return the page with the errors that its blocks raise now."""
    prelude: list[str] = []

    def block(match: re.Match[str]) -> str:
        code = match[1]
        if not prelude:
            prelude.append(code)
            return match[0]
        return f"```python\n{code}```\n\n```text\n{error_of(prelude[0], code)}\n```\n"

    return BLOCK.sub(block, page)


def error_of(prelude: str, code: str) -> str:
    """Run a mistake and return the text of its error, with line numbers relative to the block."""
    from mithril import MithrilError

    source = "mistake.py"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names: dict[str, object] = {"__name__": "mistake"}
        exec(compile(prelude, "prelude.py", "exec"), names)
        linecache.cache[source] = (len(code), None, code.splitlines(True), source)  # errors quote lines of it
        try:
            exec(compile(code, source, "exec"), names)
        except (MithrilError, AttributeError) as error:  # unknown names of modules are AttributeErrors
            text = f"{type(error).__name__}: {error}".rstrip()
            return re.sub(r"and \d+ others", "and others", text)  # the number depends on plugins
    return "no error"


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield each mistake of a page with its error."""
    yield from ((m[1], m[2] or "") for m in list(BLOCK.finditer(page))[1:])


if __name__ == "__main__":
    PAGE.write_text(regenerated(PAGE.read_text()))
