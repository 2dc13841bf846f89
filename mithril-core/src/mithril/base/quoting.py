"""Quoting of names in generated text: functions for string literals, comments and listings.

A name may contain any character. The results contain none that ends a literal, a comment or a line, changes the
direction of text, or cannot be stored in a file.
"""

from __future__ import annotations

import re


def quoted(text: str) -> str:
    """Return a literal in double quotes, valid in Python and in graph text."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(f"\\{c}" if c in '"\\' else visible(c) for c in text) + '"'


def visible(text: str) -> str:
    """Return one line of printable characters; others are escaped as in Python."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def docstring(text: str) -> str:
    """Return the text as a docstring for generated Python code."""
    return f'""{quoted(text)}""'


def c_quoted(text: str) -> str:
    """Return a C11 string literal in UTF-8, with bytes in octal that could end it or begin a trigraph."""
    return '"' + "".join(map(_c_byte, utf8(text))) + '"'


def c_visible(text: str) -> str:
    """Return text for a C comment, without comment delimiters and trigraphs."""
    shown = visible(text).encode("ascii", "backslashreplace").decode()
    return re.sub(r"\?(?=\?)", "? ", shown.replace("*/", "* /").replace("/*", "/ *"))


def utf8(text: str) -> bytes:
    """Return the name in UTF-8; lone surrogates are encoded by their code points."""
    return text.encode("utf-8", "surrogatepass")


def storable(name: object) -> bool:
    """Whether a name can be stored in a file: it is a str without lone surrogates."""
    return isinstance(name, str) and not any("\ud800" <= c <= "\udfff" for c in name)


def _c_byte(byte: int) -> str:
    return chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}"
