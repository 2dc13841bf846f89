"""The GGML backend on the whole conformance kit."""

import mithril as ml
from mithril_testing import BackendConformance


class TestGGML(BackendConformance):
    backend = "ggml"
    configurations = (ml.GGMLBackend(quantize="q8_0"), ml.GGMLBackend(quantize="q4_k"), ml.GGMLBackend(num_threads=2))
