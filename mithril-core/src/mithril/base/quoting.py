"""Names as text inside other text: one function each for literals and for comments, listings and pictures.

A name may hold any character. Nothing here leaves one in that ends a literal, a comment or a line, that changes the
direction of reading, or that no file can hold.
"""

from __future__ import annotations

import re


def quoted(text: str) -> str:
    """Return a literal in double quotes, which Python and the text of graphs read back as the same name."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(f"\\{c}" if c in '"\\' else visible(c) for c in text) + '"'


def visible(text: str) -> str:
    """Return one line of printable characters: others as Python escapes them."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def docstring(text: str) -> str:
    """Return the docstring of a Python file."""
    return f'""{quoted(text)}""'


def c_quoted(text: str) -> str:
    """Return a string literal of C11: its UTF-8, with every byte in octal that could end it, or begin a trigraph."""
    return '"' + "".join(map(_c_byte, utf8(text))) + '"'


def c_visible(text: str) -> str:
    """Return text for a comment of C: it can neither end the comment nor begin another, and holds no trigraph."""
    shown = visible(text).encode("ascii", "backslashreplace").decode()
    return re.sub(r"\?(?=\?)", "? ", shown.replace("*/", "* /").replace("/*", "/ *"))


def utf8(text: str) -> bytes:
    """Return the bytes of a name; halves of surrogate pairs, which have none of their own, by their numbers."""
    return text.encode("utf-8", "surrogatepass")


def storable(name: object) -> bool:
    """Whether files can hold a name: it is text, and has no half of a surrogate pair."""
    return isinstance(name, str) and not any("\ud800" <= c <= "\udfff" for c in name)


def _c_byte(byte: int) -> str:
    return chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}"
