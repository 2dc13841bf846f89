"""Kernels compile by NVRTC without a GPU: those of some operations every day, of the whole kit in the soak test."""

import pytest
from cuda_stub import PARTS, TODAY

import mithril as ml
from mithril import ops
from mithril.backend import BuildOptions
from mithril.graph import ALL, Builder
from mithril_cbackend.c_names import KEYWORDS, LIBM
from mithril_cbackend.devices.build import written
from mithril_cbackend.devices.model import DeviceModel
from mithril_cuda import nvrtc
from mithril_testing.cases import backend_cases, differentiable, gradient_graph
from mithril_testing.devices import first_samples
from mithril_testing.grown import join_graphs

CAPABILITIES = (80, 90)


def texts_of(graph):
    options = BuildOptions()
    program = written(ml.CUDABackend().decomposed(graph, options), DeviceModel("cuda"), options)
    return [launch.text for launch in program.launches]


def entries(texts, capability):
    return nvrtc.compiled(texts, capability, assembly=True).count(b".entry")


def test_kernels_of_operations_compile():
    graph, _ = first_samples(frozenset(ALL), TODAY, PARTS)
    texts = texts_of(graph)
    assert len(texts) > 20
    assert [entries(texts, capability) for capability in CAPABILITIES] == [len(texts)] * len(CAPABILITIES)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_of_the_kit_compile(part, record_property):
    cases = list(backend_cases(frozenset(ALL)))[part::PARTS]
    graphs = {case.id: case.graph() for case in cases}
    graphs |= {
        f"gradient of {c.id}": gradient_graph(c.graph()) for c in cases if c.sample.gradient and differentiable(c)
    }
    texts = texts_of(join_graphs(list(graphs.items()), "kit"))
    record_property("kernels", len(texts))
    print(f"{len(cases)} cases, {len(graphs)} graphs, {len(texts)} kernels")
    for capability in CAPABILITIES:
        assert entries(texts, capability) == len(texts)


def test_names_that_cuda_reserves():
    names = sorted({*KEYWORDS, *(f"{f}f" for f in LIBM), *LIBM, "uint", "threadIdx", "blockIdx", "warpSize", "printf"})
    with Builder() as b:
        total = sum((ops.tanh(b.input(name, (3,))) for name in names[1:]), start=ops.tanh(b.input(names[0], (3,))))
    texts = texts_of(b.build({"template": total}))
    assert entries(texts, 80) == len(texts)


def test_errors_of_the_compiler(monkeypatch):
    version = ".".join(map(str, nvrtc.version()))
    text = 'extern "C" __global__ void k(float* x) { x[0] = missing(); }'
    with pytest.raises(ml.BackendError) as error:
        nvrtc.compiled([text], 80)
    message, first, *_, hint = str(error.value).splitlines()
    assert message == f"NVRTC {version} cannot compile 1 kernels for sm_80"
    assert first.endswith('error: identifier "missing" is undefined')
    assert hint == "hint: this is a bug in mithril-cuda: please report it with str(compiled.graph)"
    with pytest.raises(ml.BackendError) as error:
        nvrtc.compiled([text], 20)
    listed = ", ".join(f"{n / 10:.1f}" for n in nvrtc.supported())
    assert str(error.value) == (
        f"NVRTC {version} cannot compile for compute capability 2.0\n  it compiles for: {listed}\n"
        "hint: an older GPU needs an older NVRTC: pip install 'nvidia-cuda-nvrtc-cu12<12.9'"
    )
    monkeypatch.setattr(nvrtc, "places", lambda: ["libmissing.so"])
    nvrtc.library.cache_clear()
    with pytest.raises(ml.BackendError) as error:
        nvrtc.library()
    assert str(error.value) == (
        "compiling for CUDA needs NVRTC, which is not installed\nhint: pip install 'mithril-cuda[nvrtc]'"
    )


def test_a_newer_gpu_gets_assembly():
    text = 'extern "C" __global__ void k(float* x) { x[0] = 1; }'
    assert nvrtc.compiled([text], 80).startswith(b"\x7fELF")
    newest = nvrtc.supported()[-1]
    assert f".target sm_{newest}".encode() in nvrtc.compiled([text], newest + 7)
