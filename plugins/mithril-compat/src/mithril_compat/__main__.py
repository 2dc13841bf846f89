"""``python -m mithril_compat script.py [arguments]`` runs a program of the predecessor unchanged."""

from __future__ import annotations

import sys

from mithril_compat.running import run

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m mithril_compat SCRIPT [ARGUMENTS]")
    run(sys.argv[1], sys.argv[2:])
