"""Messages for the logger ``mithril`` of the standard library."""

from __future__ import annotations

import sys

from mithril.graph.errors import visible

NUMBERS = {"debug": 10, "info": 20, "warning": 30}  # the numbers of the standard library


def log(level: str, message: object) -> None:
    """Send a message to the logger ``mithril``, if the program uses ``logging``.

    A program that has not imported the module has no handler that could show messages; it does not pay for the import.
    """
    logging = sys.modules.get("logging")
    if logging is None:
        return
    logger = logging.getLogger("mithril")
    if not logger.handlers:
        # Without any handler, logging itself prints warnings; libraries add this one, by its documentation.
        logger.addHandler(logging.NullHandler())
    if logger.isEnabledFor(NUMBERS[level]):
        logger.log(NUMBERS[level], "%s", visible(str(message)))
