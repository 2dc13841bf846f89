"""The names of the predecessor's ``mithril.framework.common``."""

from mithril_compat.language.connection import NOT_GIVEN, TBD, IOKey, Tensor

__all__ = ["NOT_GIVEN", "TBD", "IOKey", "Tensor"]
