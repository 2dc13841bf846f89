"""The features that rows cross, as factors with values. A new feature is one entry here.

A value's ``apply`` changes the case of a row. Its ``limits`` say with which values of other factors it has no meaning
(``Excluded``), is refused with an error that names both (``Refused``), or fails because of a defect (``Known``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import mithril as ml
from mithril.models import Embedding, Model, Sequential, Tanh, hook

from . import third_party
from .files import archive, checkpoint
from .modes import BLOCK, CONTEXT, MODES, short, typed
from .networks import CUSTOM, NETWORKS

Row = Mapping[str, str]


class Limit:
    """Features that do not work together: ``Limit(reason, factor=values, ...)``; all factors must match."""

    def __init__(self, reason: str, words: str = "", **when: str) -> None:
        self.reason, self.words = reason, tuple(words.split())
        self.when = {factor: names.split() for factor, names in when.items()}

    def holds(self, row: Row) -> bool:
        return all(row.get(factor) in names for factor, names in self.when.items())


class Excluded(Limit):
    """The pair has no meaning, or the harness has no way to make it: no row contains it."""


class Refused(Limit):
    """The pair is refused before any work by an error that contains all ``words``."""


class Known(Limit):
    """A defect that is not repaired yet: rows are counted, and not run."""


@dataclass(frozen=True)
class Value:
    """A value of a factor."""

    name: str
    apply: Callable[[Any], None] = lambda case: None
    limits: tuple[Limit, ...] = ()

    def applies_to(self, row: Row) -> Limit | None:
        """Return the first limit that holds for the other values of a row, complete or not."""
        return next((limit for limit in self.limits if limit.holds(row)), None)


@dataclass
class Case:
    """A row on its way: the model, and how it is compiled and called."""

    row: Row
    folder: Path
    shared: Path  # a folder that all processes of a mesh have
    model: Any = None
    axes: list[str | int] = field(default_factory=list)
    rows: int = 4
    length: int = 3
    open: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)  # options of the trainer
    backend: Any = "numpy"
    double: bool = False
    tolerance: float = 2e-4
    frozen: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    target: tuple[int, ...] = ()  # shape of a row of the output
    keeps_state: bool = True  # whether running statistics are compared
    seen: Any = None  # the samples of each training step, or the tokens that were generated
    rounded: bool = False  # whether training rounds weights
    adversarial: bool = False
    input: str = "input"
    output: str = "output"

    @property
    def network(self) -> Any:
        return NETWORKS[self.row["network"]]

    def place(self, name: str) -> str:
        """Return the path of the first or the last layer."""
        if self.row["network"] == "decoder":
            return {"first": "*embed_tokens", "last": "*lm_head"}[name]
        return name

    def sized(self, rows: int | None = None) -> list[int]:
        """Return the shape of a batch."""
        return [{"B": rows or self.rows, "T": self.length}.get(axis, axis) for axis in self.axes]  # type: ignore[call-overload]

    def batch(self, rows: int | None = None, seed: int = 0) -> np.ndarray:
        """Return inputs of the given number of rows; the first rows are the same for every number of them."""
        rng = np.random.default_rng(seed)
        shape = self.sized(16 if rows is None else max(rows, 16))
        if self.network.tokens:
            values = rng.integers(0, self.network.tokens, shape).astype(np.int32)
        else:
            values = short(rng.normal(size=shape)).astype(np.float64 if self.double else np.float32)
        return values[: self.rows if rows is None else rows]

    def change_mesh(self) -> None:
        """Divide by another mesh; the values of the others are removed."""
        self.options.pop("parallelism", None)
        other = {"data": "fsdp", "fsdp": "model", "model": "data", "none": "none"}[self.row["mesh"]]
        value("mesh", other).apply(self)

    def change_engine(self) -> None:
        self.options.pop("parallelism", None)
        self.backend = "numpy" if self.row["engine"] != "numpy" else "torch"

    def compile(self, **more: Any) -> Any:
        axes = self.axes if self.open else self.sized()
        options = {"shapes": {self.input: list(axes)}, **self.options, **more}
        if self.double and not self.network.tokens:
            options["types"] = {"input": ml.float64}
        return ml.compile(self.model, self.backend, **options)


# sources


def own(case: Case) -> Model:
    network = case.network
    return network.model() if network.model else Model(*network.layers())


def wired(case: Case) -> None:
    if case.network.model:
        case.model = own(case)
        return
    model, name = Model(), "input"
    layers = case.network.layers()
    for number, layer in enumerate(layers):
        result = "output" if number == len(layers) - 1 else f"h{number}"
        model |= layer(input=name, output=result)
        name = result
    case.model = model


def sequential(case: Case) -> None:
    case.model = Sequential(*case.network.layers())


def functional(case: Case) -> None:
    h: Any = ml.IOKey("input")
    for layer in case.network.layers():
        result = layer(h)
        h = result[0] if isinstance(result, tuple) else result
    case.model = Model.create(outputs={"output": h})


def json(case: Case) -> None:
    case.model = Model.from_json(own(case).to_json(), layers=CUSTOM)


def torch(case: Case) -> None:
    import torch

    open_axes = {place: axis for place, axis in enumerate(case.network.axes) if isinstance(axis, str)}
    example = torch.zeros(case_shape(case))
    case.model = ml.from_torch(case.network.module(), example, dynamic_shapes={"input": open_axes})


def case_shape(case: Case) -> list[int]:
    return [{"B": 4, "T": 3}.get(axis, axis) for axis in case.network.axes]


def onnx(case: Case) -> None:
    compiled = ml.compile(own(case), "numpy", shapes={"input": list(case.network.axes)}, inference=True)
    compiled.export(case.folder / "source.onnx", params=compiled.randomize_params(0))
    case.model = ml.from_onnx(case.folder / "source.onnx")


def jax(case: Case) -> None:
    import jax

    def function(params: Any, input: Any) -> Any:
        return jax.numpy.tanh(input @ params["first"]["weight"]) @ params["last"]["weight"]

    rng = np.random.default_rng(0)
    params = {
        name: {"weight": rng.normal(size=shape).astype(np.float32)}
        for name, shape in (("first", (6, 8)), ("last", (8, 3)))
    }
    example = np.zeros((4, 6), np.float32)
    case.model = ml.from_jax(function, example, params=params, dynamic_shapes={"input": {0: "B"}})


def keras(case: Case) -> None:
    archive(case.folder / "source.keras")
    case.model = ml.from_keras(case.folder / "source.keras")
    case.model.rename("last", "output")


def stablehlo(case: Case) -> None:
    compiled = ml.compile(own(case), "jax", shapes={"input": case_shape(case)}, inference=True)
    params = compiled.bind(compiled.randomize_params(0)).params
    compiled.export(case.folder / "source.mlir")
    case.model = ml.from_stablehlo(case.folder / "source.mlir", params=params)


def pretrained(case: Case) -> None:
    checkpoint(case.folder / "source")
    decoder(case, ml.from_pretrained(case.folder / "source", **cache(case)))


def cache(case: Case) -> dict[str, int]:
    """Return the cache of a decoder that continues texts."""
    return {"cache": CONTEXT} if case.row["mode"] == "generate" else {}


def decoder(case: Case, model: Model) -> None:
    if case.row["mode"] in DECODING:  # uses of decoders, which know their terminals by name
        case.model, case.input, case.output = model, "input_ids", "logits"
        return
    case.model = Model()
    case.model |= model(input_ids="input", logits="output")


def gguf(case: Case) -> None:
    """Read the decoder from a file in the layout of llama.cpp."""
    from mithril_ggml.gguf.load import from_gguf

    checkpoint(case.folder / "source")
    compiled = ml.compile(ml.from_pretrained(case.folder / "source"), "numpy", inference=True)
    compiled.export(case.folder / "source.gguf", architecture="llama")
    decoder(case, from_gguf(case.folder / "source.gguf"))


LISTS = "mlp dropout convolutions encoder lstm gru experts scan masked foreign"
IMPORTED = "torch onnx jax keras stablehlo pretrained gguf"
DECODING = "generate to_llama"
TABLES = "layers sequential functional json torch onnx jax keras stablehlo"
WIRED = "tied loop branch unread unet"
TRAINING = "train accumulate average adversarial"

UNTRAINED_MODES = f"infer gradient module function safetensors to_onnx to_json to_gguf {DECODING}"
JSON_CODE = Refused("files of models hold no code of other frameworks", "file export", mode="to_json")
OTHERS = Excluded("not the network of the checkpoint", network=f"{LISTS} {WIRED}")
SOURCES = (
    Value("layers", wired),
    Value("sequential", sequential, (Excluded("the network is no list of layers", network=WIRED),)),
    Value("functional", functional, (Excluded("the network is no list of layers", network=WIRED),)),
    Value("json", json),
    Value(
        "torch",
        torch,
        (
            Excluded("no module is written for it", network=f"dropout encoder gru experts scan masked foreign {WIRED}"),
            JSON_CODE,
        ),
    ),
    Value(
        "onnx",
        onnx,
        (
            Excluded("training differs from inference", network="dropout branch convolutions"),
            Excluded("ONNX has no form of the operation", network="foreign"),
            Refused(
                "a weight of several layers belongs to none of them in ONNX",
                "last has no parameter weight",
                network="tied",
                surgery="lora",
            ),
            JSON_CODE,
        ),
    ),
    Value("jax", jax, (Excluded("no function is written for it", network=f"{LISTS[4:]} {WIRED}"), JSON_CODE)),
    Value(
        "keras",
        keras,
        (
            Excluded("no archive is written for it", network=f"{LISTS[4:]} {WIRED}"),
            JSON_CODE,
        ),
    ),
    Value(
        "stablehlo",
        stablehlo,
        (
            Excluded("training differs from inference", network="dropout branch convolutions"),
            Excluded("StableHLO has no form of the operation", network="foreign"),
            Excluded("its programs have static sizes", sizes="open odd one empty"),
            Excluded("the last batch of an epoch is smaller", mode=TRAINING),
            Excluded("its programs have no layers", surgery="lora replace hook freeze outputs"),
            Refused(
                "loops of StableHLO have no bound",
                "max_trips gradient",
                network="lstm gru loop experts scan unread",
                mode="gradient module function",
            ),
            JSON_CODE,
        ),
    ),
    Value("pretrained", pretrained, (OTHERS,)),
    Value("gguf", gguf, (OTHERS, Excluded("the cache is an argument of ml.load", mode="generate"))),
)

# surgery


def lora(case: Case) -> None:
    case.model.replace(case.place("last"), ml.LoRA(rank=2, alpha=3))


def replace(case: Case) -> None:
    if case.row["network"] == "tied":
        case.model.replace("tanh", ml.models.Sigmoid())
    else:
        case.model.replace(case.place("last"), case.network.last())


def hooked(case: Case) -> None:
    case.model.replace(case.place("last"), hook(lambda y: ml.ops.tanh(y) * 2.0))


def freeze(case: Case) -> None:
    case.frozen = f"{case.place('first')}.*"
    case.training["frozen"] = case.frozen


def outputs(case: Case) -> None:
    inner = {"tied": "h", "loop": "begin", "branch": "h"}.get(case.row["network"], case.place("first"))
    case.options["outputs"] = [inner, "output"]


def renamed(case: Case) -> None:
    case.model.rename("output", "answer")
    case.model.rename("answer", "output")


def derivative(case: Case) -> None:
    """Take the gradient of a scalar for each row, and the rows at once: `grad` and `vmap` of the model."""
    inner = Model()
    inner |= case.model(input="input", output="scores")
    inner |= ml.models.Sum()(input="scores", output="output")
    case.model = ml.vmap(ml.grad(inner, of="output", wrt="input"))


def rows_at_once(case: Case) -> None:
    case.model = ml.vmap(case.model)


BATCHED = Excluded("an imported model declares the axis of its batch", source=IMPORTED)
UNBATCHED = Excluded(
    "written for batches, or with an input that says how to map it",
    network="convolutions encoder lstm gru experts dropout branch decoder scan masked foreign unread unet",
)
NO_JSON = Excluded("a transformed model is no layer, and has no JSON", mode="to_json")
TRAINED = Excluded("changes the model that is trained, not a program", mode=TRAINING)
SURGERY = (
    Value("none"),
    Value("lora", lora),
    Value("replace", replace),
    Value(
        "hook",
        hooked,
        (Refused("files of models hold no functions", "Hooked file", mode="to_json"),),
    ),
    Value(
        "freeze",
        freeze,
        (
            Excluded(
                "frozen parameters are those of a trainer",
                mode=UNTRAINED_MODES,
            ),
            Excluded("its only parameter would be frozen", network="tied"),
        ),
    ),
    Value(
        "outputs",
        outputs,
        (
            Excluded("values inside are found by layers only", source="onnx", network="tied loop"),
            Excluded("its layers are inside one block", network="decoder"),
            TRAINED,
        ),
    ),
    Value(
        "rename",
        renamed,
        (
            Excluded("only a wired model has terminals to rename", source=f"sequential {IMPORTED}"),
            Excluded("decoders are imported", mode=DECODING),
        ),
    ),
    Value(
        "vmap",
        rows_at_once,
        (
            UNBATCHED,
            BATCHED,
            NO_JSON,
        ),
    ),
    Value(
        "derivative",
        derivative,
        (
            UNBATCHED,
            BATCHED,
            TRAINED,
            NO_JSON,
            Excluded("an input of integers", network="tied decoder"),
        ),
    ),
)

# sizes


def sizes(open_sizes: bool, rows: int, length: int = 3) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        case.open, case.rows, case.length = open_sizes, rows, length

    return apply


SIZES = (
    Value("exact", sizes(False, 4)),
    Value("open", sizes(True, 4)),
    Value("odd", sizes(True, 7, 5)),
    Value("one", sizes(True, 1, 1)),
    Value(
        "empty",
        sizes(True, 0),
        (
            Excluded("an empty batch has no loss", mode=TRAINING),
            Excluded("calibration needs rows", precision="int8"),
            Excluded("there is no text to continue", mode="generate"),
        ),
    ),
)

# precision


def precision(tolerance: float, **options: Any) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        case.tolerance, case.keeps_state = tolerance, False
        case.options.update(options)

    return apply


def calibrated(case: Case) -> None:
    exact = Case({**case.row, "precision": "float32"}, case.folder, case.shared, case.model, case.axes, open=True)
    compiled = exact.compile(inference=True)
    compiled.bind(typed(exact, case.params))
    ranges = ml.calibrate_ranges(compiled, [{"input": exact.batch(32, seed)} for seed in range(2)])
    case.tolerance = 0.15
    case.options |= {"quantization": {"ranges": ranges}, "static_inference": True}


INFERENCE = Excluded("for inference only", mode=f"gradient module function {TRAINING}")
UNROUNDED = Excluded("rounds weights of a trainer", mode=UNTRAINED_MODES)


def rounding(case: Case) -> None:
    """Train with weights that are rounded to eight bits in blocks of two; float32 and float64 may round differently."""
    case.tolerance = 5e-4
    case.rounded, case.training["quantization_aware"] = True, {"block": BLOCK, "activations": False}


PRECISIONS = (
    Value("float32"),
    Value("bfloat16", precision(6e-2, precision="bfloat16")),
    Value("float16", precision(1e-2, precision="float16")),
    Value("mixed", precision(6e-2, mixed_precision=True)),
    Value("dynamic8", precision(0.15, quantization={"activations": "dynamic"}, static_inference=True), (INFERENCE,)),
    Value(
        "int8",
        calibrated,
        (
            INFERENCE,
            Excluded("calibrated on other inputs than these uses have", mode=DECODING),
            Excluded("calibrated on 32 rows", source="stablehlo"),
        ),
    ),
    Value(
        "aware8",
        rounding,
        (
            UNROUNDED,
            Excluded("the reference rounds the weight in the embedding, too", network="tied"),
        ),
    ),
    Value("nf4", precision(0.3, quantization={"weights": "nf4"}, static_inference=True), (INFERENCE,)),
)

# options


def option(**options: Any) -> Callable[[Case], None]:
    return lambda case: case.options.update(options)


def another(case: Case) -> list[Any]:
    return [Embedding(97, 4)] if case.row["network"] == "decoder" else [own(case)]


def cached(case: Case) -> None:
    """Programs come from the disk, and another one of the same shapes is there."""
    case.options |= {"cache": True, "cache_dir": case.folder / "cache"}
    other = Case({**case.row, "options": "none"}, case.folder, case.shared, Model(*another(case), Tanh()), case.axes)
    other.backend = case.row["engine"]
    other.options = {name: value for name, value in case.options.items() if name != "outputs"}  # names of its layers
    for _ in range(2):
        compiled = other.compile(inference=True)
        params, batch = compiled.randomize_params(0), {"input": other.batch()}
        compiled.evaluate(params, batch)
        compiled.bind(params)(batch)  # a program of its own, without the expressions of parameters


def own_pass(graph: Any) -> Any:
    """Remove nothing: a pass of a user, which sees every graph."""
    assert graph.nodes is not None
    return graph


def elsewhere(case: Case) -> None:
    """Run the first layer on another engine."""
    (layer,) = case.model.find(case.place("first")).values()
    layer.set_attribute("backend", "other")
    case.options["backend_map"] = {"other": "torch" if case.row["engine"] == "numpy" else "numpy"}


def lowered(case: Case) -> None:
    third_party.add_lowerings()


ONE_ENGINE = Refused("a function of one framework has one engine", "single backend backend_map", mode="function module")
ONE_ENGINE_ON_A_MESH = Refused(
    "PyTorch differentiates programs on a mesh, and no other engine",
    "single backend backend_map several devices",
    engine="torch",
    mesh="data fsdp model",
    mode="gradient",
)
NO_AUTOGRAD = Refused(
    "NumPy, C and GGML have no automatic differentiation, mithril's own does it",
    "automatic differentiation",
    engine="numpy c ggml",
    mode="gradient",
)
NO_EMPTY = Refused(
    "MLX may end the process, or never return, where it differentiates empty arrays",
    "automatic differentiation empty",
    engine="mlx",
    mode="gradient",
    sizes="empty",
)
NO_EAGER_MESH = Refused("XLA divides programs", "jit=False mesh", engine="jax", mesh="data fsdp model")
OPTIONS = (
    Value("medium"),
    Value("none", option(optimization_level="none")),
    Value("low", option(optimization_level="low")),
    Value("high", option(optimization_level="high")),
    Value("unfused", option(optimizations={"fusion": False})),
    Value("checkpointing", option(gradient_checkpointing=True)),
    Value("native", option(semantics="native")),
    Value(
        "jit",
        option(jit=True),
        (
            Excluded("minutes of compiling", engine="torch"),
            Excluded("minutes of compiling, for PyTorch", engine="numpy", event="resume_engine"),
        ),
    ),
    Value("no_jit", option(jit=False), (NO_EAGER_MESH,)),
    Value("static", option(static_inference=True), (INFERENCE,)),
    Value("cache", cached),
    Value("numeric", option(verify="numeric")),
    Value("latency", option(optimize_for="latency")),
    Value("memory", option(max_memory_gb=1)),
    Value("pass", option(custom_passes=[own_pass])),
    Value(
        "backend_map",
        elsewhere,
        (
            ONE_ENGINE,
            ONE_ENGINE_ON_A_MESH,
            Excluded("its layers have other names, or none", source="onnx stablehlo"),
            Excluded("a transformed model has no layers", surgery="vmap derivative"),
        ),
    ),
    Value("lowering", lowered),
    Value("scan_layers", option(scan_layers=True), (Excluded("an option of JAX", engine="numpy torch mlx c ggml"),)),
    Value("framework", option(autodiff="native"), (NO_AUTOGRAD, NO_EMPTY)),
)

# events

UNTRAINED = Excluded("happens in training", mode=UNTRAINED_MODES)
EVENTS = (
    Value("none"),
    Value(
        "threads",
        limits=(
            Excluded("threads share a program, not a trainer", mode=f"gradient module function {TRAINING} {DECODING}"),
            Excluded("PyTorch's processes exchange arrays in one order", engine="torch", mesh="data fsdp model"),
        ),
    ),
    *(
        Value(name, limits=(UNTRAINED,))
        for name in (
            *("second_fit", "interrupt", "exception", "interrupt_epoch", "exception_validation"),
            *("resume", "resume_batch"),
        )
    ),
    Value(
        "resume_engine",
        limits=(UNTRAINED, Excluded("two processes are one training", engine="torch", mesh="data fsdp model")),
    ),
    Value("resume_mesh", limits=(UNTRAINED, Excluded("there is no mesh", mesh="none"))),
)

# engines


def engine(name: str) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        case.backend = name

    return apply


ENGINES = tuple(Value(name, engine(name)) for name in ("numpy", "jax", "torch", "mlx", "c", "ggml"))

# meshes


def mesh(sizes: tuple[int, ...], parallelism: str | None = None) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        backend = ml.JaxBackend if case.row["engine"] == "jax" else ml.TorchBackend
        case.backend = backend(device="cpu", device_mesh=sizes)
        if parallelism:
            case.options["parallelism"] = parallelism

    return apply


WHOLE = Refused("other frameworks divide their own functions and modules", "several devices", mode="function module")
ONE = Excluded("a mesh has devices of JAX or PyTorch", engine="numpy mlx c ggml")
MESHES = (
    Value("none"),
    *(
        Value(name, apply, (ONE, WHOLE))
        for name, apply in (("data", mesh((2,))), ("fsdp", mesh((2,), "fsdp")), ("model", mesh((1, 2))))
    ),
)

HOST = "no framework differentiates the reference of an operation, which runs in NumPy"
NETWORK_LIMITS: dict[str, tuple[Limit, ...]] = {
    "foreign": (
        Refused(HOST, "differentiate acme.bend", mode="function module"),
        Refused(HOST, "differentiate acme.bend", options="framework", mode="gradient", engine="jax torch mlx"),
    ),
    "decoder": (
        Excluded(
            "the network is that of a checkpoint",
            source=TABLES,
        ),
    ),
}
DECODERS = Excluded("a use of decoders", network=f"{LISTS} {WIRED}")
MODE_LIMITS: dict[str, tuple[Limit, ...]] = {
    "to_onnx": (
        Refused("ONNX has no form of a third party's operation", "acme.bend mithril_lowerings", network="foreign"),
    ),
    "generate": (DECODERS,),
    "to_llama": (
        DECODERS,
        Refused("files of llama.cpp hold the layers of its families", "family", surgery="lora replace hook"),
    ),
    "adversarial": (
        Excluded("each pass changes statistics", network="convolutions dropout branch"),
        Excluded("its outputs are tokens", network="decoder tied"),
        Excluded("a transformed model is no part of another one", surgery="vmap derivative"),
    ),
    "to_gguf": (Excluded("files of GGML", engine="numpy jax torch mlx c"),),
    "module": (Excluded("a module of PyTorch", engine="numpy jax mlx c ggml"),),
    "function": (Excluded("functions are for frameworks that differentiate them", engine="numpy torch c ggml"),),
}


def network(case: Case) -> None:
    if case.row["network"] == "foreign":
        third_party.add_operation()
    case.axes = list(case.network.axes)


FACTORS: dict[str, tuple[Value, ...]] = {
    "network": tuple(Value(name, network, NETWORK_LIMITS.get(name, ())) for name in NETWORKS),
    "source": SOURCES,
    "surgery": SURGERY,
    "sizes": SIZES,
    "precision": PRECISIONS,
    "options": OPTIONS,
    "engine": ENGINES,
    "mesh": MESHES,
    "event": EVENTS,
    "mode": tuple(Value(name, limits=MODE_LIMITS.get(name, ())) for name in MODES),
}
BY_NAME = {(factor, one.name): one for factor, values in FACTORS.items() for one in values}
PLAIN = {
    "sizes": "exact",
    "precision": "float32",
    "options": "none",
    "engine": "numpy",
    "mesh": "none",
    "event": "none",
}


def value(factor: str, name: str) -> Value:
    return BY_NAME[factor, name]


def limits(row: Row) -> list[Limit]:
    """Return every limit that holds for a row, complete or not."""
    applicable = (value(factor, name).applies_to(row) for factor, name in row.items())
    return [limit for limit in applicable if limit]


def make(row: Row, folder: Path, shared: Path, params: Mapping[str, Any] | None = None) -> Case:
    """Apply the values of a row, in the order of the factors; calibration needs parameters."""
    case = Case(row, folder, shared, params=params or {})
    for factor in FACTORS:
        value(factor, row[factor]).apply(case)
    return case
