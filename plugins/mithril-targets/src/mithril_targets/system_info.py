"""Small files and commands of the operating system; a missing one is not an error."""

from __future__ import annotations

import subprocess
from pathlib import Path


def read(path: str | Path) -> str | None:
    """Return the stripped text of a file of /proc or /sys, or None."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def read_int(path: str | Path) -> int | None:
    """Read a file that contains one integer, or return None."""
    text = read(path)
    return int(text) if text is not None and text.isdigit() else None


def run_command(*command: str, seconds: float = 2.0) -> str | None:
    """Return the output of a command, or None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
