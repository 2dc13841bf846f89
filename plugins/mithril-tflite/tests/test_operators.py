"""Every operator, its options and its quantized forms: results equal those of the interpreter."""

import numpy as np
import pytest
from tflite_files import Model, interpreted

import mithril as ml
from mithril_tflite import model as _model  # noqa: F401  (registers the operators)
from mithril_tflite.schema import NAMES, OPTIONS
from mithril_tflite.table import OPERATORS

RNG = np.random.default_rng(7)
SAME, VALID = 0, 1
CONV = {"stride_w": 1, "stride_h": 1}
RELU, RELU_N1, RELU6, TANH = 1, 2, 3, 4


def real(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def ints(low, high, *shape, dtype=np.int32):
    return RNG.integers(low, high, shape).astype(dtype)


def const(x, dtype=np.int32):
    return ("constant", np.asarray(x, dtype))


def weight(*shape):
    return ("constant", real(*shape))


def quantized(x, scale, zero, dtype=np.int8):
    """Return an operand of a quantized tensor."""
    limits = np.iinfo(dtype)
    q = np.clip(np.round(x / scale) + zero, limits.min, limits.max).astype(dtype)
    return ("quantized", q, scale, zero)


def quantized_weight(*shape, axis, dtype=np.int8):
    x = real(*shape)
    scales = np.abs(x).max(axis=tuple(k for k in range(len(shape)) if k != axis)) / 127
    spread = scales.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    return ("weight", np.round(x / spread).astype(dtype), scales, axis)


def bias(x_scale, scales):
    x = RNG.standard_normal(len(scales)) / 10
    return ("weight", np.round(x / (x_scale * scales)).astype(np.int32), (x_scale * scales).astype(np.float32), 0)


class Case:
    def __init__(self, operator, operands, results=1, dtype="float32", q=None, label="", **options):
        self.operator, self.operands, self.results = operator, operands, results
        self.dtypes = [dtype] * results if isinstance(dtype, str) else dtype
        self.q, self.options = q, options
        self.name = f"{operator}-{label}" if label else operator


IMAGE = real(2, 7, 6, 4)
A, B, ROW = real(2, 3, 4), real(2, 3, 4), real(4)
POSITIVE = np.abs(A) + 0.1
BOOLS, OTHER = A > 0, B > 0
N, M = ints(-9, 10, 3, 4), ints(1, 5, 3, 4)


def cases():
    for padding in (SAME, VALID):
        for stride in (1, 2):
            options = {"padding": padding, "stride_w": stride, "stride_h": stride}
            label = f"{padding}-{stride}"
            yield Case("CONV_2D", [IMAGE, weight(5, 3, 2, 4), weight(5)], activation=RELU, label=label, **options)
            yield Case(
                "DEPTHWISE_CONV_2D",
                [IMAGE, weight(1, 3, 3, 8), weight(8)],
                depth_multiplier=2,
                activation=RELU6,
                label=label,
                **options,
            )
            size = [2, 7 * stride, 6 * stride, 3] if padding == SAME else [2, 6 * stride + 3, 5 * stride + 2, 3]
            yield Case("TRANSPOSE_CONV", [const(size), weight(3, 3, 2, 4), IMAGE, weight(3)], label=label, **options)
            for kind in ("AVERAGE_POOL_2D", "MAX_POOL_2D", "L2_POOL_2D"):
                yield Case(kind, [IMAGE], filter_width=2, filter_height=3, label=label, **options)
    dilated = {"padding": SAME, "dilation_w_factor": 2, "dilation_h_factor": 3, **CONV}
    yield Case("CONV_2D", [IMAGE, weight(5, 3, 2, 4), weight(5)], label="dilated", **dilated)
    yield Case(
        "DEPTHWISE_CONV_2D", [IMAGE, weight(1, 3, 3, 4), weight(4)], depth_multiplier=1, label="dilated", **dilated
    )
    yield Case("CONV_2D", [IMAGE, weight(6, 2, 2, 2), weight(6)], padding=VALID, label="groups", **CONV)
    yield Case(
        "CONV_3D",
        [real(1, 4, 5, 5, 2), weight(2, 2, 3, 2, 3), weight(3)],
        padding=SAME,
        stride_d=1,
        stride_w=2,
        stride_h=1,
    )
    yield Case("AVERAGE_POOL_2D", [IMAGE], padding=VALID, filter_width=6, filter_height=7, label="global", **CONV)
    x = real(2, 3, 8)
    yield Case("FULLY_CONNECTED", [x, weight(5, 8), weight(5)], activation=RELU6)
    yield Case("FULLY_CONNECTED", [x, weight(5, 8)], keep_num_dims=True, activation=RELU_N1, label="keep")
    yield Case("BATCH_MATMUL", [real(2, 3, 4), real(2, 4, 5)])
    yield Case("BATCH_MATMUL", [real(2, 4, 3), real(1, 5, 4)], adj_x=True, adj_y=True, label="transposed")
    yield Case("EMBEDDING_LOOKUP", [ints(0, 9, 5), weight(9, 3)])
    for kind in ("ADD", "SUB", "MUL", "DIV"):
        yield Case(kind, [A, const(ROW, np.float32)], activation=RELU, label="row")
        yield Case(kind, [real(2, 1, 4), real(3, 4)], label="broadcast")
    yield Case("DIV", [N, M], dtype="int32", label="integers")
    for kind in ("MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE"):
        yield Case(kind, [A, B])
    yield Case("POW", [POSITIVE, B])
    yield Case("ATAN2", [A, B])
    for kind in ("FLOOR_DIV", "FLOOR_MOD"):
        yield Case(kind, [A, B])
        yield Case(kind, [N, M], dtype="int32", label="integers")
    for kind in ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"):
        yield Case(kind, [N, ints(-9, 10, 3, 4)], dtype="bool")
    yield Case("LOGICAL_AND", [BOOLS, OTHER], dtype="bool")
    yield Case("LOGICAL_OR", [BOOLS, OTHER], dtype="bool")
    yield Case("LOGICAL_NOT", [BOOLS], dtype="bool")
    yield Case("BITWISE_XOR", [N, M], dtype="int32")
    yield Case("RIGHT_SHIFT", [N, M], dtype="int32")
    for kind in (
        "ABS",
        "NEG",
        "EXP",
        "SIN",
        "COS",
        "SQUARE",
        "FLOOR",
        "CEIL",
        "ROUND",
        "SIGN",
        "ZEROS_LIKE",
        "RELU",
        "RELU6",
        "RELU_N1_TO_1",
        "RELU_0_TO_1",
        "TANH",
        "LOGISTIC",
        "ELU",
        "HARD_SWISH",
        "LOG_SOFTMAX",
    ):
        yield Case(kind, [A * 3])
    for kind in ("LOG", "SQRT", "RSQRT"):
        yield Case(kind, [POSITIVE])
    yield Case("ADD_N", [A, B, A])
    yield Case("LEAKY_RELU", [A], alpha=0.2)
    yield Case("PRELU", [IMAGE, weight(1, 1, 4)])
    yield Case("GELU", [A], approximate=False)
    yield Case("GELU", [A], approximate=True, label="tanh")
    yield Case("SOFTMAX", [A], beta=1.0)
    yield Case("SOFTMAX", [A], beta=0.5, label="beta")
    yield Case("SELECT", [BOOLS, A, B])
    yield Case("SELECT", [np.asarray([True, False]), A, B], label="rows")
    yield Case("SELECT_V2", [BOOLS[:, :1], A, const([1.0, 2, 3, 4], np.float32)])
    yield Case("CAST", [A * 5], dtype="int32")
    yield Case("CAST", [N], label="integers")
    yield Case("CAST", [BOOLS], label="bools")
    yield Case("FAKE_QUANT", [A], min=-1.3, max=2.0, num_bits=8, narrow_range=False)

    yield Case("RESHAPE", [A, const([4, -1])])
    yield Case("RESHAPE", [A], new_shape=[6, 4], label="option")
    yield Case("SQUEEZE", [real(1, 3, 1, 2)], squeeze_dims=[0])
    yield Case("SQUEEZE", [real(1, 3, 1, 2)], label="all")
    yield Case("EXPAND_DIMS", [A, const(-1)])
    yield Case("TRANSPOSE", [A, const([2, 0, 1])])
    yield Case("CONCATENATION", [A, real(2, 1, 4)], axis=1)
    yield Case("CONCATENATION", [A, real(2, 3, 2)], axis=-1, label="last")
    yield Case("PACK", [A, B], axis=1, slots={0: ("i", 2)})
    yield Case("UNPACK", [A], results=3, num=3, axis=1)
    yield Case("SPLIT", [const(2), A], results=2, union=35, slots={0: ("i", 2)})
    yield Case("SPLIT_V", [A, const([1, -1]), const(1)], results=2, union=79, slots={0: ("i", 2)})
    yield Case("SLICE", [A, const([0, 1, 1]), const([2, -1, 2])])
    yield Case("SLICE", [A, ints(0, 2, 3), const([1, 2, 3])], label="computed")
    strided = [const([0, 2, 1]), const([2, 0, 4]), const([1, -1, 2])]
    yield Case("STRIDED_SLICE", [A, *strided])
    yield Case("STRIDED_SLICE", [A, *strided], begin_mask=5, end_mask=3, label="masks")
    yield Case(
        "STRIDED_SLICE", [A, const([0, 2, 1]), const([2, 3, 4]), const([1, 1, 2])], shrink_axis_mask=2, label="shrink"
    )
    yield Case(
        "STRIDED_SLICE",
        [A, const([0, -1]), const([0, 0]), const([1, 1])],
        ellipsis_mask=1,
        shrink_axis_mask=2,
        label="ellipsis",
    )
    yield Case(
        "STRIDED_SLICE",
        [A, const([0, 0, 1]), const([0, 1, 3]), const([1, 1, 1])],
        new_axis_mask=1,
        end_mask=2,
        label="new axis",
    )
    yield Case("STRIDED_SLICE", [A, const([-1, 0, 3]), const([-9, 9, -9]), const([-1, 1, -2])], label="backwards")
    widths = [[1, 0], [0, 2], [1, 1]]
    yield Case("PAD", [A, const(widths)])
    yield Case("PADV2", [A, const(widths), const(3.5, np.float32)])
    yield Case("MIRROR_PAD", [A, const(widths)], mode=0, label="reflect")
    yield Case("MIRROR_PAD", [A, const(widths)], mode=1, label="symmetric")
    yield Case("TILE", [A, const([1, 2, 3])])
    yield Case("BROADCAST_TO", [real(3, 1), const([2, 3, 4])])
    yield Case("BROADCAST_ARGS", [const([3, 1]), const([2, 1, 4])], dtype="int32")
    yield Case("FILL", [const([2, 3]), real()])
    yield Case("RANGE", [const(2), const(11), const(4)], dtype="int32")
    yield Case("RANGE", [const(0.5, np.float32), const(3, np.float32), const(0.75, np.float32)], label="floats")
    yield Case("SHAPE", [A], dtype="int32", union=55, slots={0: ("b", 2)})
    yield Case("RANK", [A], dtype="int32")
    yield Case("REVERSE_V2", [A, const([1])])
    yield Case("REVERSE_SEQUENCE", [A, const([2, 3])], seq_dim=1, batch_dim=0)
    yield Case("SPACE_TO_DEPTH", [real(1, 4, 6, 3)], block_size=2)
    yield Case("DEPTH_TO_SPACE", [real(1, 2, 3, 12)], block_size=2)
    yield Case("SPACE_TO_BATCH_ND", [real(2, 5, 6, 3), const([2, 3]), const([[0, 1], [2, 1]])])
    yield Case("BATCH_TO_SPACE_ND", [real(6, 3, 2, 3), const([3, 2]), const([[1, 0], [0, 1]])])

    for kind in ("MEAN", "SUM", "REDUCE_PROD", "REDUCE_MAX", "REDUCE_MIN"):
        yield Case(kind, [A, const([0, 2])], keep_dims=False)
        yield Case(kind, [A, const([-1])], keep_dims=True, label="keep")
    yield Case("REDUCE_ANY", [BOOLS, const([1])], dtype="bool", keep_dims=False)
    yield Case("REDUCE_ALL", [BOOLS, const([1])], dtype="bool", keep_dims=False)
    yield Case("ARG_MAX", [A, const(2)], dtype="int64", union=40, slots={0: ("b", 4)})
    yield Case("ARG_MIN", [A, const(-2)], dtype="int64", union=57, slots={0: ("b", 4)})
    yield Case("TOPK_V2", [A, const(2)], results=2, dtype=["float32", "int32"])
    yield Case("CUMSUM", [A, const(1)], exclusive=True, reverse=True)
    yield Case("L2_NORMALIZATION", [A])
    yield Case("LOCAL_RESPONSE_NORMALIZATION", [IMAGE], radius=2, bias=1.0, alpha=0.5, beta=0.75)

    yield Case("GATHER", [A, ints(0, 3, 2, 2)], axis=1)
    yield Case("GATHER", [real(2, 3, 4), ints(0, 4, 2, 5)], axis=2, batch_dims=1, label="batch")
    yield Case("GATHER_ND", [A, ints(0, 2, 3, 2)])
    yield Case("SCATTER_ND", [np.asarray([[1], [3], [1]], np.int32), real(3, 2), const([5, 2])])
    yield Case(
        "ONE_HOT", [np.asarray([2, -1, 0], np.int32), const(3), const(2.5, np.float32), const(-1, np.float32)], axis=-1
    )
    yield Case(
        "ONE_HOT", [ints(0, 3, 2, 2), const(3), const(1, np.float32), const(0, np.float32)], axis=1, label="axis"
    )
    yield Case("DYNAMIC_UPDATE_SLICE", [A, real(1, 2, 4), np.asarray([1, 1, 0], np.int32)])
    yield Case("WHERE", [const([[True, False], [True, True]], bool)], dtype="int64")
    segments = [A, np.asarray([2, 0], np.int32), const(4)]
    for kind in ("SUM", "PROD", "MAX", "MIN"):
        yield Case(f"UNSORTED_SEGMENT_{kind}", segments)
    for align, half in ((False, False), (True, False), (False, True)):
        options = {"align_corners": align, "half_pixel_centers": half, "label": f"{align}-{half}"}
        for size in ([11, 3], [14, 12]):
            yield Case("RESIZE_BILINEAR", [IMAGE, const(size)], **options | {"label": f"{align}-{half}-{size[0]}"})
            yield Case(
                "RESIZE_NEAREST_NEIGHBOR", [IMAGE, const(size)], **options | {"label": f"{align}-{half}-{size[0]}"}
            )

    yield Case("DEQUANTIZE", [("constant", A.astype(np.float16))], label="float16")
    yield from recurrent()
    yield from quantized_cases()


def recurrent():
    x, units = real(2, 5, 3), 4
    state, cell = (("variable", (2, units)) for _ in range(2))
    yield Case("UNIDIRECTIONAL_SEQUENCE_RNN", [x, weight(4, 3), weight(4, 4), weight(4), state], activation=TANH)
    gates, inner, biases = ([weight(*s) for _ in range(4)] for s in ((4, 3), (4, 4), (4,)))
    none = [None] * 3
    options = {"activation": TANH, "time_major": False}
    yield Case("UNIDIRECTIONAL_SEQUENCE_LSTM", [x, *gates, *inner, *none, *biases, None, None, state, cell], **options)
    peepholes, norms = [weight(4) for _ in range(3)], [weight(4) for _ in range(4)]
    projected, outer = ("variable", (2, 2)), [weight(4, 2) for _ in range(4)]
    yield Case(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        [real(5, 2, 3), *gates, *outer, *peepholes, *biases, weight(2, 4), weight(2), projected, cell, *norms],
        activation=TANH,
        time_major=True,
        cell_clip=1.5,
        proj_clip=0.8,
        label="all",
    )
    yield Case(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        [x, None, *gates[1:], None, *inner[1:], *none, None, *biases[1:], None, None, state, cell],
        label="coupled",
        **options,
    )


def quantized_cases():
    for dtype, zero in ((np.int8, 3), (np.uint8, 131)):
        if dtype == np.int8:
            x = quantized(IMAGE, 0.02, zero, dtype)
            w = quantized_weight(6, 3, 3, 4, axis=0)
            yield Case(
                "CONV_2D",
                [x, w, bias(0.02, w[2])],
                dtype="int8",
                q=(0.07, -5),
                activation=RELU,
                padding=SAME,
                label="int8",
                **CONV,
            )
            w = quantized_weight(1, 3, 3, 4, axis=3)
            yield Case(
                "DEPTHWISE_CONV_2D",
                [x, w, bias(0.02, w[2])],
                dtype="int8",
                q=(0.05, 7),
                depth_multiplier=1,
                padding=SAME,
                label="int8",
                stride_w=2,
                stride_h=2,
            )
            w = quantized_weight(3, 3, 2, 4, axis=0)
            size = const([2, 14, 12, 3])
            yield Case(
                "TRANSPOSE_CONV",
                [size, w, x, bias(0.02, w[2])],
                dtype="int8",
                q=(0.06, 2),
                padding=SAME,
                label="int8",
                stride_w=2,
                stride_h=2,
            )
            w = quantized_weight(5, 4, axis=0)
            yield Case(
                "FULLY_CONNECTED",
                [quantized(A, 0.03, -4), w, bias(0.03, w[2])],
                dtype="int8",
                q=(0.04, 1),
                activation=RELU6,
                label="int8",
            )
        name = np.dtype(dtype).name
        a, b = quantized(A, 0.02, zero, dtype), quantized(B, 0.03, zero - 2, dtype)
        for kind in ("ADD", "SUB", "MUL"):
            yield Case(kind, [a, b], dtype=name, q=(0.05, zero), label=name, activation=RELU)
        image = quantized(IMAGE, 0.02, zero, dtype)
        for kind in ("AVERAGE_POOL_2D", "MAX_POOL_2D"):
            yield Case(
                kind,
                [image],
                dtype=name,
                q=(0.02, zero),
                padding=SAME,
                filter_width=2,
                filter_height=2,
                stride_w=2,
                stride_h=2,
                label=name,
            )
        yield Case("MEAN", [image, const([1, 2])], dtype=name, q=(0.01, zero), keep_dims=True, label=name)
        yield Case("RESHAPE", [a, const([-1])], dtype=name, q=(0.02, zero), label=name)
        yield Case("PAD", [a, const([[0, 1], [1, 0], [2, 2]])], dtype=name, q=(0.02, zero), label=name)
        yield Case("CONCATENATION", [a, a], dtype=name, q=(0.02, zero), axis=0, label=name)
        yield Case(
            "RESIZE_BILINEAR", [image, const([9, 9])], dtype=name, q=(0.02, zero), half_pixel_centers=True, label=name
        )
        yield Case("LEAKY_RELU", [a], dtype=name, q=(0.02, zero), alpha=0.3, label=name)
        low = -128 if dtype == np.int8 else 0
        yield Case("SOFTMAX", [a], dtype=name, q=(1 / 256, low), beta=1.0, label=name)
        yield Case("LOGISTIC", [a], dtype=name, q=(1 / 256, low), label=name)
        yield Case("TANH", [a], dtype=name, q=(1 / 128, low + 128), label=name)
        yield Case("HARD_SWISH", [a], dtype=name, q=(0.02, zero), label=name)
        yield Case("QUANTIZE", [a], dtype=name, q=(0.031, zero + 4), label=name)
        yield Case("QUANTIZE", [A], dtype=name, q=(0.031, zero), label=f"from-{name}")
        yield Case("DEQUANTIZE", [a], label=name)
        yield Case("ARG_MAX", [a, const(-1)], dtype="int32", label=name, union=40, slots={0: ("b", 2)})
        yield Case("GREATER", [a, b], dtype="bool", label=name)
    x = quantized(A, 0.0004, 0, np.int16)
    w = quantized_weight(5, 4, axis=0)
    sums = bias(0.0004, w[2])
    yield Case(
        "FULLY_CONNECTED",
        [x, w, ("weight", sums[1].astype(np.int64), *sums[2:])],
        dtype="int16",
        q=(0.0005, 0),
        label="int16",
    )
    yield Case("ADD", [x, x], dtype="int16", q=(0.0009, 0), label="int16")


CASES = list(cases())


def add(graph, case):
    """Add the operator of a case; return the arrays of its inputs and its results."""
    operands, arrays = [], []
    for x in case.operands:
        if x is None:
            operands.append(None)
        elif isinstance(x, np.ndarray) or np.isscalar(x):
            operands.append(graph.input(np.shape(x), np.asarray(x).dtype.name))
            arrays.append(np.asarray(x))
        elif x[0] == "constant":
            operands.append(graph.constant(x[1]))
        elif x[0] == "variable":
            operands.append(graph.tensor(x[1], variable=True))
        elif x[0] == "quantized":
            operands.append(graph.input(x[1].shape, x[1].dtype.name, scale=x[2], zero=x[3]))
            arrays.append(x[1])
        else:
            operands.append(graph.constant(x[1], scale=x[2], axis=x[3]))
    scale, zero = case.q or (None, 0)
    results = [graph.tensor(None, dtype, scale=scale, zero=zero) for dtype in case.dtypes]
    graph.operator(case.operator, operands, results, **case.options)
    graph.outputs += results
    return arrays, results


class Results:
    """All cases in one file, and the results of backends, by case."""

    def __init__(self):
        model = Model()
        graph = model.graph()
        self.inputs, self.places = [], []
        for case in CASES:
            arrays, results = add(graph, case)
            self.inputs += arrays
            self.places.append(slice(len(graph.outputs) - len(results), len(graph.outputs)))
        self.content = model.bytes()
        self.computed, self.expected = {}, {}

    def of(self, backend, position):
        if backend not in self.computed:
            imported = ml.from_tflite(self.content)
            compiled = ml.compile(imported, backend, inference=True)
            values = compiled(dict(zip(imported.inputs, self.inputs, strict=True)))
            self.computed[backend] = [np.asarray(v) for v in values.values()]
        if position not in self.expected:
            model = Model()
            arrays, _ = add(model.graph(), CASES[position])
            self.expected[position] = interpreted(model, arrays)
        return self.computed[backend][self.places[position]], self.expected[position]


@pytest.fixture(scope="module")
def results():
    return Results()


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("position", range(len(CASES)), ids=[case.name for case in CASES])
def test_results_equal_those_of_the_interpreter(results, backend, position):
    if backend != "numpy":
        pytest.importorskip(f"mithril_{backend}")
    values, expected = results.of(backend, position)
    for value, correct in zip(values, expected, strict=True):
        assert value.shape == correct.shape and value.dtype == correct.dtype
        if CASES[position].q and correct.dtype.kind in "iu":
            assert np.abs(value.astype(np.int64) - correct).max() <= 1  # one quantum
        elif correct.dtype.kind == "f":
            np.testing.assert_allclose(value, correct, rtol=2e-5, atol=2e-5)
        else:
            np.testing.assert_array_equal(value, correct)


def test_every_operator_has_a_case_and_takes_its_options():
    elsewhere = {"IF", "WHILE", "CALL", "CALL_ONCE", "VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE", "DENSIFY"}
    assert {case.operator for case in CASES} == set(OPERATORS) - elsewhere
    for name, row in OPERATORS.items():
        assert name in NAMES
        fields = {f.partition(":")[0] for f in OPTIONS.get(name, (0, ""))[1].split()} - {"_"}
        keywords = set(row.signature.keywords)
        assert keywords - {"context", "masks"} <= fields or name == "STRIDED_SLICE"
        assert fields - keywords <= {"activation"} or name == "STRIDED_SLICE"
