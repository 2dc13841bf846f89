"""The conformance kit: pytest classes for authors of backends, operations, passes, targets and profilers.

.. code-block:: python

    from mithril.testing import BackendConformance

    class TestMine(BackendConformance):
        backend = "mine"
        xfail = {"cumsum[int8]": "the library promotes to int32"}

Nothing here is loaded by pytest on its own. ``KIT_VERSION`` rises when the kit gets stricter.
"""

from mithril.testing.backend import BackendConformance
from mithril.testing.cases import Case, backend_cases
from mithril.testing.compare import Tolerance, assert_close, tolerance
from mithril.testing.operation import OpConformance
from mithril.testing.plugins import ProfilerConformance, TargetConformance
from mithril.testing.sample_arrays import arrays_for, make_array
from mithril.testing.transforms import PassConformance, RuleConformance

KIT_VERSION = 1

__all__ = [
    "KIT_VERSION",
    "BackendConformance",
    "Case",
    "OpConformance",
    "PassConformance",
    "ProfilerConformance",
    "RuleConformance",
    "TargetConformance",
    "Tolerance",
    "arrays_for",
    "assert_close",
    "backend_cases",
    "make_array",
    "tolerance",
]
