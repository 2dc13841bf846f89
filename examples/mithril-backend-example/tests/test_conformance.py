"""The whole conformance kit on a backend that lives outside mithril's tree."""

from mithril_testing import BackendConformance


class TestStepper(BackendConformance):
    backend = "stepper"
    distribution = "mithril-backend-example"
