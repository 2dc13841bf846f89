"""Exported C: compiles without warnings, Python and TVM, and computes the results of the model."""

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import mithril as ml
import mithril_cbackend
from mithril import ops
from mithril.graph import BackendError, Builder, InputError, MithrilError, decompose, int32
from mithril.models import (
    BatchNorm1d,
    Conv2d,
    Embedding,
    If,
    LayerNorm,
    Linear,
    Model,
    MultiHeadAttention,
    Relu,
    While,
)
from mithril_cbackend import toolchains
from mithril_cbackend.backend import CBackend
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph import fusion
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.c_text import c_quoted
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)


def needs(*tools):
    missing = [t for t in tools if shutil.which(t) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def stacked(*layers):
    model = Model()
    for layer in layers:
        model += layer
    return model


def mlp():
    return stacked(Linear(32, name="first"), Relu(), Linear(10, name="last")), {"input": [5, 16]}


def wide():
    """Weights that are transposed in registers."""
    return stacked(Linear(48, name="l")), {"input": [9, 40]}


def normalized():
    return stacked(LayerNorm(name="n"), Linear(7, name="l")), {"input": [6, 24]}


def grouped():
    """Weights of whole groups of 32 elements."""
    return stacked(Linear(32, name="first"), Relu(), Linear(32, name="last")), {"input": [4, 64]}


def image():
    return stacked(Conv2d(4, kernel_size=3, padding=1, name="c"), Relu()), {"input": [1, 3, 8, 8]}


def attention():
    return stacked(MultiHeadAttention(heads=2, name="a")), {"query": [2, 5, 16]}


def words():
    return stacked(Embedding(7, 8, name="e"), Linear(3, name="l")), {"input": [4]}


def statistics():
    """State that a run only reads."""
    return stacked(Linear(8, name="l"), BatchNorm1d(8, name="n")), {"input": [4, 8]}


def cached():
    """State that every run changes."""
    model = Model()
    model |= MultiHeadAttention(heads=2, cache=6, name="a")(query="query", position="position", output="output")
    return model, {"query": [1, 2, 16], "position": []}


def branch():
    model = Model()
    model |= If("flag", Relu(), Linear(3, name="l"))(input="x", flag="flag", output="y")
    return model, {"x": [2, 3], "flag": []}


def repeated():
    body = Model()
    body |= Linear(4, name="l")(input="h", output="next")
    model = Model()
    model |= While(
        condition="i < 3",
        body=body,
        initial_state={"h": "x", "i": 0},
        loop_vars={"h": "next", "i": "i + 1"},
        output_vars={"y": "h"},
    )(output="y")
    return model, {"x": [2, 4]}


MODELS = [mlp, wide, normalized, image, attention, words, statistics, cached, branch, repeated]


def compiled(build, **options):
    model, shapes = build()
    compiled_model = ml.compile(model, "c", shapes=shapes, inference=True, **options)
    return compiled_model.bind(compiled_model.randomize_params(seed=1))


def make(folder, *arguments):
    done = subprocess.run(["make", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(folder, *arguments):
    """Compile and run the test; the largest difference, by the largest magnitude."""
    output = make(folder, "check", *arguments)
    errors = re.findall(r"largest difference (\S+) of (\S+)", output)
    assert errors, output
    return max(float(error) / float(largest) for error, largest in errors)


STRICT = (
    "-std=c11 -O1 -march=native -ffp-contract=fast -fwrapv -fstrict-aliasing -Wall -Wextra -Wpedantic -Wconversion "
    "-Wcast-qual -Wstrict-prototypes -Werror"
)
OK, MISSING, UNINITIALIZED, MISALIGNED, UNKNOWN = 0, -1, -2, -3, -4  # return codes


@needs("gcc", "make")
@pytest.mark.parametrize("build", MODELS, ids=lambda f: f.__name__)
def test_exported_c_gives_the_same(build, tmp_path):
    compiled(build).export(tmp_path)
    text = (tmp_path / "model.c").read_text()
    assert "tvm" not in text.lower()
    assert set(re.findall(r"#include (\S+)", text)) <= {
        '"model.h"',
        "<math.h>",
        "<stdbool.h>",
        "<stddef.h>",
        "<stdint.h>",
        "<string.h>",
    }
    assert "int64_t)(intptr_t" not in text
    assert f'"mithril {ml.__version__}"' in (tmp_path / "model.h").read_text()
    assert check(tmp_path, "CC=gcc", f"CFLAGS={STRICT}") <= 1e-6


@needs("gcc", "make")
def test_with_its_own_flags_it_gives_the_same_bits(tmp_path):
    compiled(mlp).export(tmp_path)
    assert check(tmp_path, "CC=gcc") == 0


CLANG = shutil.which("clang") or (f"{sys.executable} -m ziglang cc" if importlib.util.find_spec("ziglang") else None)


@pytest.mark.skipif(CLANG is None, reason="not installed: clang or ziglang")
@needs("gcc", "make")
@pytest.mark.parametrize("options", [{}, {"weights": "int4"}, {"weights": "int4", "activations": "dynamic"}], ids=str)
def test_clang_compiles_it(options, tmp_path):
    """Link with gcc, because ziglang compiles a C library before it links."""
    static = {"static_inference": True, "quantization": options} if options else {}
    compiled(grouped if options else cached, **static).export(tmp_path)
    make(tmp_path, "model.o", f"CC={CLANG}", f"CFLAGS={STRICT} -fno-sanitize=all")
    assert check(tmp_path, "CC=gcc", f"CFLAGS={STRICT}") <= 1e-6


@needs("gcc", "make")
def test_functions_of_vectors_compile_without_warnings_for_all_processors(tmp_path):
    """Compile as ``make ARCH=`` does: the vectors are wider than the registers of that architecture."""
    setting = {"weights": "int4", "activations": "dynamic"}
    compiled(grouped, static_inference=True, quantization=setting).export(tmp_path)
    make(tmp_path, "model.o", "CC=gcc", "CFLAGS=-std=c11 -O1 -fwrapv -Wall -Wextra -Werror")


@needs("gcc", "make")
@pytest.mark.parametrize("build", [wide, image, cached, repeated], ids=lambda f: f.__name__)
def test_sanitizers_are_silent(build, tmp_path):
    compiled(build, cpu_options={"vector_bytes": 16}).export(tmp_path)  # short kernels compile quickly
    flags = "-std=c11 -O1 -g -Wall -Werror -fsanitize=address,undefined -fno-sanitize-recover=all"
    make(tmp_path, "check", "CC=gcc", f"CFLAGS={flags}")


@needs("gcc", "make", "valgrind")
def test_valgrind_is_silent(tmp_path):
    compiled(cached).export(tmp_path)
    make(tmp_path, "all", "CC=gcc", "CFLAGS=-std=c11 -O1 -g -Wall -Werror")
    toolchains.run(["valgrind", "--error-exitcode=9", "--leak-check=full", str(tmp_path / "model_test")])


@needs("gcc", "make")
def test_parallel_loops_are_openmp(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_graph, "processors", lambda: 2)
    model = stacked(Linear(256, name="l"), Relu())
    compiled_model = ml.compile(model, "c", shapes={"input": [64, 256]}, inference=True, num_threads=2)
    compiled_model.bind(compiled_model.randomize_params(seed=1)).export(tmp_path)
    assert "PARALLEL" in (tmp_path / "model.c").read_text()
    assert check(tmp_path, "CC=gcc", "THREADS=1", "RUN=env OMP_NUM_THREADS=2") <= 1e-6


@needs("cmake", "gcc")
def test_cmake_builds_it(tmp_path):
    compiled(mlp).export(tmp_path)
    toolchains.run(["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build"), "-DCMAKE_C_COMPILER=gcc"])
    toolchains.run(["cmake", "--build", str(tmp_path / "build")])
    assert "100% tests passed" in toolchains.run(["ctest", "--test-dir", str(tmp_path / "build")])


@needs("g++")
def test_the_header_is_cpp_as_well(tmp_path):
    compiled(mlp).export(tmp_path)
    (tmp_path / "use.cpp").write_text('#include "model.h"\nint main() { return sizeof(model_t) == 0; }\n')
    toolchains.run(
        ["g++", "-Wall", "-Wextra", "-Werror", "-c", str(tmp_path / "use.cpp"), "-o", str(tmp_path / "use.o")]
    )


@needs("gcc", "make")
def test_large_weights_stay_in_their_file(tmp_path):
    compiled(mlp).export(tmp_path, embed=False)
    assert not (tmp_path / "model_weights.c").exists()
    assert check(tmp_path, "CC=gcc", f"CFLAGS={STRICT}", "RUN=cd $(CURDIR) &&") <= 1e-6


@needs("cc", "make")
def test_a_shared_library_runs_with_weights_set_one_by_one(tmp_path):
    compiled_model = compiled(mlp)
    exported = compiled_model.export(tmp_path, name="net", library="shared")
    assert exported.code_bytes > 500
    library = ctypes.CDLL(str(exported.library))
    sizes = dict(re.findall(r"#define (\w+) (\d+)", (tmp_path / "net.h").read_text()))
    net = np.zeros(library.net_instance_size() // 8 + 1, np.int64)
    arena = np.zeros(int(sizes["NET_ARENA_BYTES"]), np.uint8)
    pointer = net.ctypes.data_as(ctypes.c_void_p)
    library.net_init(pointer, arena.ctypes.data_as(ctypes.c_void_p))
    for name, x in compiled_model.params.items():
        assert library.net_set_weight(pointer, name.encode(), x.ctypes.data_as(ctypes.c_void_p)) == 0
    assert library.net_set_weight(pointer, b"absent", arena.ctypes.data_as(ctypes.c_void_p)) == UNKNOWN
    assert library.net_set_weight(pointer, b"first.weight", None) == MISSING
    assert list((ctypes.c_int32 * 4).in_dll(library, "net_shapes")) == [5, 16, 5, 10]
    x = np.random.default_rng(3).standard_normal((5, 16)).astype(np.float32)
    y = np.zeros(int(sizes["NET_OUTPUT_SIZE"]), np.float32)
    library.net_run(pointer, x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p))
    np.testing.assert_allclose(y.reshape(5, 10), compiled_model({"input": x})["output"], rtol=1e-5, atol=1e-6)


@needs("cc", "make")
def test_cotangents_of_a_gradient_are_arguments(tmp_path):
    program = ml.compile(stacked(Linear(5, name="l"), Relu()), "c", shapes={"input": [3, 4]})
    program.bind(program.randomize_params(seed=0))
    inputs, cotangents = {"input": np.ones((3, 4), np.float32)}, {"output": np.ones((3, 5), np.float32)}
    program.evaluate(program.params, inputs, output_gradients=cotangents)
    program.export(tmp_path, inputs=inputs)
    assert "const float grad_output[MODEL_GRAD_OUTPUT_SIZE]" in (tmp_path / "model.h").read_text()
    assert check(tmp_path) <= 1e-6


@needs("gcc", "make")
def test_programs_of_baked_weights_are_exported(tmp_path):
    """Weights that are constants leave buffers without elements, which are not passed at the address of another."""
    model = stacked(Conv2d(16, kernel_size=3, padding=1, name="c"), Conv2d(16, kernel_size=3, padding=1, name="d"))
    short = {"static_inference": True, "cpu_options": {"vector_bytes": 16}}
    compiled_model = compiled(lambda: (model, {"input": [1, 16, 8, 8]}), **short)
    exported = compiled_model.export(tmp_path)
    assert not exported.contents.params
    assert len(exported.contents.weights) >= 4 * 2 * 16 * 16 * 9
    assert check(tmp_path, "CC=gcc", f"CFLAGS={STRICT}") <= 1e-6


def test_vectors_of_a_row_are_one_loop_without_branches():
    """Compilers select the width of vectors, and gcc does not unroll loops before it could vectorize them."""
    with Builder() as b:
        x, scale = b.input("x", (4, 48)), b.input("scale", (4, 1))
        small, shared = ops.cast(ops.round(x), dtype="int8"), ops.exp(x / scale)
        total = ops.max(x, axis=1)
    source = ml.compile(b.build({"a": small, "b": shared, "c": total}), "c", cpu_options={"vector_bytes": 16}).source
    assert re.search(r"j\w* < 192; .*\n( +const .*\n)+ +\w+\[j\w*\] = \w+;", source), source
    assert re.search(r"j\w* < 48; .*\n( +const .*\n)+ +\w+\[i\w* \* 48 \+ j\w*\] = \w+;", source), source
    assert re.search(r"ROLLED\n +for \(int32_t \w+ = 0; \w+ < 4;", source), source


# -- telephones ---------------------------------------------------------------------------------------------------
def telephone(build, arch, **options):
    static = {"static_inference": True, "quantization": {"weights": "int4"}} if build is grouped else {}
    return compiled(build, mobile_options={"platform": "linux", "arch": arch, **options}, **static)


@needs("aarch64-linux-gnu-gcc", "qemu-aarch64", "make")
@pytest.mark.parametrize("build", [wide, image, attention, cached], ids=lambda f: f.__name__)
def test_arm64_gives_the_same(build, tmp_path):
    exported = telephone(build, "arm64-v8a").export(tmp_path)
    assert exported.library == tmp_path / "libmodel.a"
    assert check(tmp_path) <= 1e-6


@needs("arm-none-eabi-gcc", "qemu-arm", "make")
@pytest.mark.parametrize("build", [wide, attention, grouped], ids=lambda f: f.__name__)
def test_armv7_gives_the_same(build, tmp_path):
    """Link a C library whose system calls are those of the emulator."""
    target = telephone(build, "armeabi-v7a").export(tmp_path, library=None).contents.target
    flags = f"CFLAGS={target.flags_of('arm-none-eabi-gcc')} -mfloat-abi=hard -Werror"
    assert check(tmp_path, "CC=arm-none-eabi-gcc", flags, "PROGRAM=--specs=rdimon.specs", "RUN=qemu-arm") <= 1e-6


def test_ziglang_has_its_own_flags_of_armv7():
    toolchain = toolchains.FOREIGN["linux", "armeabi-v7a"]
    assert "-mfp16-format" in toolchain.flags_of("arm-linux-gnueabihf-gcc")
    assert toolchain.flags_of(f"python3 -m ziglang cc -target {toolchain.zig}") == "-mcpu=cortex_a7"


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_int8_replaces_no_short_floats(tmp_path, precision):
    compiled_model = ml.compile(
        stacked(Linear(64)),
        "c",
        shapes={"input": [3, 128]},
        precision=precision,
        mobile_options={"platform": "linux", "arch": "x86_64", "quantization": "int8"},
    )
    compiled_model.bind(compiled_model.randomize_params(seed=1))
    with pytest.raises(ml.UnsupportedError, match=rf"'int8' takes float32 weights, and '.*weight' is {precision}"):
        compiled_model.export(tmp_path, library=None)
    assert not list(tmp_path.iterdir())


@needs("gcc", "make")
def test_int8_weights_are_a_quarter_and_the_report_says_what_they_cost(tmp_path):
    model = stacked(Linear(256, name="l"), Relu(), Linear(64, name="m"))
    compiled_model = ml.compile(
        model,
        "c",
        shapes={"input": [3, 128]},
        mobile_options={"platform": "linux", "arch": "x86_64", "quantization": "int8"},
    )
    compiled_model.bind(compiled_model.randomize_params(seed=1))
    exported = compiled_model.export(tmp_path, library=None)
    float_bytes = sum(x.nbytes for x in compiled_model.params.values())
    assert len(exported.contents.weights) < 0.3 * float_bytes
    assert 0 < exported.quantization_error < 0.02
    assert "int8 weights change the results by" in str(exported)
    assert check(tmp_path, "CC=gcc", "RUN=") <= 1e-6


@needs("gcc", "make")
@pytest.mark.parametrize("rows", [1, 40])
def test_products_read_int8_weights_where_they_are(tmp_path, rows):
    """No upcast copy is stored, for either orientation of the weights or for rows of a table."""
    with Builder() as b:
        x, ids = b.input("x", (rows, 48)), b.input("ids", (rows,), int32)
        w, v, table = b.param("w", (48, 300)), b.param("v", (300, 64)), b.param("table", (100, 64))
        y = ops.linear(ops.matmul(ops.matmul(x, w), v) + ops.take(table, ids, axis=0), table)
    graph = decompose(b.build({"y": y}), lambda node: fusion.lowers(node))
    params = {i.name: RNG.standard_normal(i.type.shape).astype(np.float32) for i in graph.with_role("param")}
    arenas = {}
    for quantization in (None, "int8"):
        folder = tmp_path / str(quantization)
        executable = compile_graph.compiled(
            graph, Machine(machine_code.host_cpu(), 1, 16), CompileTarget("x86_64", "linux", quantization=quantization)
        )
        exported = mithril_cbackend.export_program(executable, folder, params, library=None)
        arenas[quantization] = exported.contents.arena_bytes
        assert check(folder, "CC=gcc", "RUN=") <= 2e-6
    assert 0 < exported.quantization_error < 0.05
    assert arenas["int8"] <= arenas[None]


def test_smaller_code_where_size_matters(tmp_path):
    if toolchains.FOREIGN["linux", "x86_64"].compiler() is None:
        pytest.skip("there is no compiler")
    fast = telephone(attention, "x86_64").export(tmp_path / "fast")
    small = telephone(attention, "x86_64", optimize_size=True).export(tmp_path / "small")
    assert small.code_bytes < fast.code_bytes
    assert f"{small.code_bytes:,} bytes" in str(small)


def test_a_missing_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ANDROID_NDK_HOME", raising=False)
    compiled_model = compiled(mlp, mobile_options={"arch": "arm64-v8a"})
    with pytest.raises(BackendError) as error:
        compiled_model.export(tmp_path / "c")
    assert str(error.value) == (
        "no C compiler is installed for the exported code\n"
        "  looked for: aarch64-linux-android24-clang\n"
        "hint: set ANDROID_NDK_HOME to the directory of Android's NDK; or call export(..., library=None) and compile "
        "elsewhere with the Makefile"
    )
    assert compiled_model.export(tmp_path / "c", library=None).library is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"archh": "arm64-v8a"}, "mobile_options"),
        ({"arch": "arm9"}, "'arch'"),
        ({"platform": "windows"}, "'platform'"),
        ({"quantization": "int2"}, "'quantization'"),
    ],
)
def test_mobile_options_are_checked(options, message):
    with pytest.raises(MithrilError, match=message):
        compiled(mlp, mobile_options=options)


def test_target_hardware_mobile_is_arm64():
    if "mobile_arm64" not in ml.plugins.targets():
        pytest.skip("mithril-targets, which knows telephones, is not installed")
    compiled_model = compiled(mlp, target_hardware="mobile")
    assert compiled_model.programs[-1].executable.target.arch == "arm64-v8a"
    assert compiled(mlp, target_hardware="mobile_x86").programs[-1].executable.target.arch == "x86_64"
    with pytest.raises(MithrilError, match="conflicts with target_hardware='mobile'"):
        compiled(mlp, target_hardware="mobile", mobile_options={"arch": "x86_64"})


# -- what cannot be exported --------------------------------------------------------------------------------------
def test_weights_must_be_known(tmp_path):
    model, shapes = mlp()
    with pytest.raises(InputError, match="weights are missing"):
        ml.compile(model, "c", shapes=shapes).export(tmp_path)


def test_other_backends_do_not_export(tmp_path):
    backend = SimpleNamespace(name="numpy", capabilities=SimpleNamespace(families=("cpu",)))
    other = SimpleNamespace(programs=[SimpleNamespace(executable=object())], backend=backend)
    with pytest.raises(MithrilError, match="backend 'numpy' does not export C"):
        mithril_cbackend.export(other, tmp_path)


# -- names and dtypes ---------------------------------------------------------------------------------------------
@needs("gcc", "make")
def test_any_name_and_any_dtype(tmp_path):
    kinds = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint32", "bool"]
    with Builder() as b:
        values = [b.input(f"{'int' if k == 0 else f'in.{kind}'}", (3, 4), kind) for k, kind in enumerate(kinds)]
        scalar, empty = b.input("9 lives", ()), b.input('quo"ted', (0, 3))
        results = {
            f"{k}/{kind}": ops.logical_not(v) if kind == "bool" else v + v
            for k, (kind, v) in enumerate(zip(kinds, values, strict=True))
        }
        results |= {
            "int": scalar * 2.0,
            "return": empty + 1.0,
            "self": scalar,
            "in.int8": values[4],
            "*/": values[2] * 3.0,
        }
    graph = decompose(b.build(results), CBackend().lowers)
    mithril_cbackend.export_program(CBackend().build(graph), tmp_path, {}, name="odd")
    assert check(tmp_path, "CC=gcc", f"CFLAGS={STRICT.replace('-Wpedantic ', '')}") <= 1e-6


# -- names --------------------------------------------------------------------------------------------------------
HOSTILE = ["run", "int8_t", "expf", "NAN", "main", "class", "AT_X", "a*/b", "new\nline", "/*", "??/", '"\\', "é\u202e"]


@needs("gcc", "make")
def test_names_of_users_are_data(tmp_path):
    """Terminals, layers and weights of every spelling compile under ``-Wall -Wextra -Werror``, as C and as C++."""
    model = Model()
    for k, name in enumerate(HOSTILE):
        model |= Linear(3, name=f"{name} {k}")(input=name, output=f"{name}!")
    compiled_model = ml.compile(model, "c", shapes={name: [2, 3] for name in HOSTILE}, inference=True)
    compiled_model.bind(compiled_model.randomize_params(seed=1)).export(tmp_path)
    assert check(tmp_path, "CC=gcc", f"CFLAGS={STRICT} -Wcomment -Wtrigraphs -Wbidi-chars=any") <= 1e-6
    for name in compiled_model.params:
        assert c_quoted(name) in (tmp_path / "model.c").read_text()


@needs("gcc", "make")
def test_values_are_not_named_like_macros_of_the_generated_file(tmp_path):
    model = Model()
    names = ["GROUP_ZERO", "WORDS_TYPE", "ROLLED", "WIDE", "words", "group_halves"]
    for name in names:
        model |= Linear(32, name=f"of {name}")(input=name, output=f"{name}!")
    setting = {"weights": "int4", "activations": "dynamic"}
    shapes = {name: [2, 32] for name in names}
    compiled(lambda: (model, shapes), static_inference=True, quantization=setting).export(tmp_path)
    assert check(tmp_path, "CC=gcc", f"CFLAGS={STRICT}") <= 1e-6


@pytest.mark.parametrize("name", ["int8", "uint_least16", "float", "size", "modèle", "1st", "a-b", "", "_x"])
def test_a_model_cannot_be_called_like_a_type_of_c(name, tmp_path):
    with pytest.raises(InputError, match="is not a valid name of a model in C"):
        compiled(mlp).export(tmp_path, name=name)


@needs("gcc", "make")
@pytest.mark.parametrize("name", ["static", "main", "arena", "weights", "sqrtf", "given"])
def test_words_of_c_name_models(name, tmp_path):
    compiled(cached).export(tmp_path, name=name)
    assert check(tmp_path, "CC=gcc", f"CFLAGS={STRICT}") <= 1e-6


ERRORS = """
#include "model.h"
static _Alignas(64) unsigned char arena[MODEL_ARENA_BYTES], weights[MODEL_WEIGHT_BYTES];
int main(void) {
  static float x[MODEL_INPUT_SIZE + 1], y[MODEL_OUTPUT_SIZE];
  const int shape[MODEL_INPUT_RANK] = MODEL_INPUT_SHAPE;
  const void *odd = (const unsigned char *)x + 1;
  model_t m = {0};
  if (shape[0] != 5 || model_shapes[0][1] != 16 || model_ranks[1] != 2 || model_arena_size() != sizeof arena) return 1;
  if (model_run(&m, x, y) != MODEL_UNINITIALIZED || model_set_weights(&m, weights) != MODEL_UNINITIALIZED) return 2;
  if (model_init(&m, arena + 1) != MODEL_MISALIGNED || model_init(&m, 0) != MODEL_MISSING) return 3;
  if (model_init(&m, arena) != MODEL_OK || model_run(&m, x, y) != MODEL_UNINITIALIZED) return 4;
  if (model_set_weights(&m, 0) != MODEL_MISSING || model_set_weights(&m, weights + 4) != MODEL_MISALIGNED) return 5;
  if (model_set_weights(&m, weights) != MODEL_OK || model_run(&m, 0, y) != MODEL_MISSING) return 6;
  if (model_run(&m, odd, y) != MODEL_MISALIGNED || model_run(&m, x, y) != MODEL_OK) return 7;
  if (model_set_weight(&m, "absent", x) != MODEL_UNKNOWN) return 8;
  return model_set_weight(&m, "first.weight", odd) == MODEL_MISALIGNED ? 0 : 9;
}
"""


@needs("gcc")
def test_wrong_arguments_return_codes(tmp_path):
    compiled(mlp).export(tmp_path, embed=False)
    (tmp_path / "use.c").write_text(ERRORS)
    built = ["gcc", "-std=c11", "-Wall", "-Werror", "use.c", "model.c", "-lm", "-o", "use"]
    toolchains.run(["sh", "-c", f"cd {tmp_path} && {' '.join(built)} && ./use"])
    fast = ["gcc", "-std=c11", "-ffast-math", "-c", str(tmp_path / "model.c"), "-o", str(tmp_path / "fast.o")]
    with pytest.raises(BackendError, match="ffast-math"):
        toolchains.run(fast)


INSTANCES = """
#include "model.h"
#include <string.h>
static _Alignas(64) unsigned char arenas[3][MODEL_ARENA_BYTES];
int main(void) {
  static model_t m[3];
  static float x[2][MODEL_QUERY_SIZE], y[3][MODEL_OUTPUT_SIZE];
  for (int k = 0; k < 3; ++k) {
    if (model_init(&m[k], arenas[k]) != 0 || model_set_weights(&m[k], model_weights) != 0) return 1;
  }
  for (int i = 0; i < MODEL_QUERY_SIZE; ++i) x[0][i] = (float)i, x[1][i] = (float)(i * i % 7);
  for (int32_t step = 0; step < 6; step += 2) { /* in turns, with different contents of their caches */
    if (model_run(&m[0], x[0], &step, y[0]) != 0 || model_run(&m[1], x[1], &step, y[1]) != 0) return 2;
  }
  for (int32_t step = 0; step < 6; step += 2) { /* alone */
    if (model_run(&m[2], x[0], &step, y[2]) != 0) return 3;
  }
  if (memcmp(y[0], y[2], sizeof y[0]) != 0 || memcmp(y[0], y[1], sizeof y[0]) == 0) return 4;
  if (model_reset(&m[1]) != 0) return 5;
  for (int32_t step = 0; step < 6; step += 2) model_run(&m[1], x[0], &step, y[1]);
  return memcmp(y[1], y[2], sizeof y[1]) == 0 ? 0 : 6;
}
"""


@needs("gcc")
def test_instances_are_independent_and_no_data_is_shared(tmp_path):
    compiled(cached).export(tmp_path)
    (tmp_path / "use.c").write_text(INSTANCES)
    built = ["gcc", "-std=c11", "-fwrapv", "use.c", "model.c", "model_weights.c", "-lm", "-o", "use"]
    toolchains.run(["sh", "-c", f"cd {tmp_path} && {' '.join(built)} && ./use && gcc -c model.c"])
    sections = toolchains.run(["size", "-A", str(tmp_path / "model.o")])
    assert re.findall(r"^\.(?:data|bss)\S* +(\d+)", sections, re.MULTILINE) == ["0", "0"]


def test_a_folder_may_have_a_dot_in_its_name(tmp_path):
    compiled(mlp).export(tmp_path / "build-1.0")
    assert (tmp_path / "build-1.0" / "model.c").exists()
    (tmp_path / "net.d").mkdir()
    compiled(mlp).export(tmp_path / "net.d")
    with pytest.raises(MithrilError, match="no file format has the suffix"):
        compiled(mlp).export(tmp_path / "model.gguff")


def endless():
    """Build a loop whose condition still holds after its last iteration."""
    body = Model()
    body |= Linear(4, name="l")(input="h", output="next")
    model = Model()
    model |= While(
        condition="i < n",
        body=body,
        initial_state={"h": "x", "i": 0, "n": "limit"},
        loop_vars={"h": "next", "i": "i + 1", "n": "n"},
        output_vars={"y": "h"},
        max_trips=3,
    )(output="y")
    return model, {"x": [2, 4], "limit": []}


CALLS = """
#include "model.h"
#include <stdio.h>
int main(void) {
  static model_t instance;
  static _Alignas(64) unsigned char arena[MODEL_ARENA_BYTES];
  static float x[8], y[8];
  const int32_t limits[3] = {2, 9, 3};
  model_init(&instance, arena);
  model_set_weights(&instance, model_weights);
  for (int k = 0; k < 3; ++k) printf("%d ", model_run(&instance, x, &limits[k], y));
  return 0;
}
"""


@needs("cc", "make")
def test_run_returns_1_where_a_loop_is_cut_off(tmp_path):
    model, shapes = endless()
    compiled_model = ml.compile(model, "c", shapes=shapes, types={"limit": "int32"}, inference=True)
    compiled_model = compiled_model.bind(compiled_model.randomize_params(seed=1))
    mithril_cbackend.export(compiled_model, tmp_path, inputs={"limit": np.int32(9)})
    header = (tmp_path / "model.h").read_text()
    assert "check" not in header.partition("int model_run(")[2]
    assert "model_run returns MODEL_TRUNCATED if a loop reached max_trips" in header
    check(tmp_path)  # the code that Python's run amounts to is expected
    (tmp_path / "calls.c").write_text(CALLS)
    sources = [tmp_path / f for f in ("calls.c", "model.c", "model_weights.c")]
    subprocess.run(["cc", "-std=c11", "-fwrapv", *sources, "-lm", "-o", tmp_path / "calls"], check=True)
    done = subprocess.run([tmp_path / "calls"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "0"]


@needs("cc", "make")
def test_full_cache_returns_1_and_keeps_its_state(tmp_path):
    compiled_model = compiled(cached)
    mithril_cbackend.export(compiled_model, tmp_path, inputs={"position": np.int32(5)})
    assert "index is past the end of a buffer" in (tmp_path / "model.h").read_text()
    test = (tmp_path / "model_test.c").read_text()
    assert test.count("!= 1) return EXIT_FAILURE") == 3
    check(tmp_path)


def test_files_replace_links(tmp_path):
    """The target of a link in the folder is unchanged, and a reader never sees a partial file."""
    foreign, folder = tmp_path / "foreign.c", tmp_path / "out"
    foreign.write_text("int main(void);")
    folder.mkdir()
    for name in ("model.c", "model.weights"):
        (folder / name).symlink_to(foreign)
    mithril_cbackend.export(compiled(mlp), folder)
    assert foreign.read_text() == "int main(void);"
    assert not (folder / "model.c").is_symlink()
    assert not (folder / "model.weights").is_symlink()
    assert not list(folder.glob(".*"))
