"""The conformance kit: pytest classes for authors of backends, operations, passes, targets and profilers.

.. code-block:: python

    from mithril_testing import BackendConformance

    class TestMine(BackendConformance):
        backend = "mine"
        xfail = {"cumsum[int8]": "the library promotes to int32"}

Pytest loads ``mithril_testing_summary`` on its own, for the line at the end of a run, and nothing here.
``KIT_VERSION`` rises when the kit gets stricter.
"""

from mithril_testing.backend import BackendConformance
from mithril_testing.cases import Case, backend_cases
from mithril_testing.compare import Tolerance, assert_close, tolerance
from mithril_testing.core_set import CORE_SET
from mithril_testing.operation import OpConformance
from mithril_testing.plugins import ProfilerConformance, TargetConformance
from mithril_testing.sample_arrays import arrays_for, make_array
from mithril_testing.transforms import PassConformance, RuleConformance

# The version of the kit; it rises when the kit gets stricter.
KIT_VERSION = 1

__all__ = [
    "CORE_SET",
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
