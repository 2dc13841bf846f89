"""The names of the predecessor's ``mithril.framework``."""

from mithril_compat.language.connection import NOT_GIVEN, TBD, Connection, IOKey, Tensor
from mithril_compat.language.model import Model

__all__ = ["NOT_GIVEN", "TBD", "Connection", "IOKey", "Model", "Tensor"]
