"""Passes: declaration, order, and the pass manager."""

from mithril.passes.manager import Pass, PassManager, pass_

__all__ = ["Pass", "PassManager", "pass_"]
