"""Quoting of names in generated C: string literals and comments."""

from __future__ import annotations

import re

from mithril.graph import visible
from mithril.system import files


def c_quoted(text: str) -> str:
    """Return a C11 string literal in UTF-8, with bytes in octal that could end it or begin a trigraph."""
    return '"' + "".join(map(_c_byte, files.utf8(text))) + '"'


def c_visible(text: str) -> str:
    """Return text for a C comment, without comment delimiters and trigraphs."""
    shown = visible(text).encode("ascii", "backslashreplace").decode()
    return re.sub(r"\?(?=\?)", "? ", shown.replace("*/", "* /").replace("/*", "/ *"))


def _c_byte(byte: int) -> str:
    return chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}"
