"""Quoting of names in generated text: literals and lines.

A name may contain any character. The results contain none that ends a literal or a line, or reverses the text.
"""

from __future__ import annotations


def quoted(text: str) -> str:
    """Return a literal in double quotes, valid in Python and in graph text."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(f"\\{c}" if c in '"\\' else visible(c) for c in text) + '"'


def visible(text: str) -> str:
    """Return one line of printable characters; others are escaped as in Python."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
