"""The modes: uses of a model, and the same by plain arithmetic.

A mode has two functions: one uses mithril as users do, the other computes the same by hand from the outputs and
gradients of the reference, which is compiled for NumPy at level none.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import mithril as ml

from .networks import CUSTOM

Arrays = dict[str, np.ndarray]
RATE, MOMENTUM, SAMPLES, BATCH = 0.05, 0.9, 14, 4
CLIP, DECAY = 0.05, 0.6
BLOCK = 2  # numbers that share a scale in quantization-aware training
CONTEXT, NEW = 16, 4  # the cache of a decoder, and the tokens that it adds


class Wrong(AssertionError):
    """A row's result or behavior is not the expected one."""


@dataclass(frozen=True)
class Mode:
    run: Callable[[Any, Arrays], Arrays]
    expect: Callable[[Any, Arrays], Arrays]


def plain(values: Any) -> Arrays:
    """Return arrays of any framework as NumPy's; floats of every precision as float64."""
    return {name: plain_array(value) for name, value in values.items()}


def plain_array(value: Any) -> np.ndarray:
    if hasattr(value, "full_tensor"):  # in parts on a mesh
        value = value.full_tensor()
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()
    elif type(value).__module__.startswith("mlx"):
        value = ml.MlxBackend().to_numpy(value)
    value = np.array(value)
    return value if value.dtype.kind in "iub" else value.astype(np.float64)


def short(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16, so that no precision of a program changes the array: the rounding of operations remains."""
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def typed(case: Any, params: Arrays) -> Arrays:
    return {name: np.asarray(x, np.float64 if case.double else np.float32) for name, x in params.items()}


# inference


def infer(case: Any, params: Arrays) -> Arrays:
    compiled = case.compile(inference=True)
    compiled.bind(typed(case, params))
    x = case.batch()
    return called_again(lambda rows: compiled({"input": rows}), x, case)


def called_again(call: Callable[[Any], Any], x: Any, case: Any) -> Arrays:
    """Call with rows, with others, and with the first ones again; by threads if the row says so."""
    first = plain(call(x))
    if case.open:
        call(case.batch(case.rows + 2))
    if case.row.get("event") == "threads":
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(lambda _: plain(call(x)), range(3)))
    else:
        results = [plain(call(x))]
    for again in results:
        for name in first:
            if not np.array_equal(first[name], again[name], equal_nan=True):
                raise Wrong(f"the second call with the same rows returns another {name}")
    return first


def expected_outputs(case: Any, params: Arrays) -> Arrays:
    compiled = case.compile(inference=True)
    return plain(compiled.evaluate(typed(case, params), {"input": case.batch()}))


# derivatives


def slopes(outputs: Arrays) -> Arrays:
    """Return a gradient for each output, a function of its place only."""
    return {name: np.cos(np.arange(math.prod(y.shape))).reshape(tuple(y.shape)) for name, y in outputs.items()}


def gradient(case: Any, params: Arrays) -> Arrays:
    compiled = case.compile()
    params = typed(case, params)
    x = case.batch()
    outputs = compiled.evaluate(params, {"input": x}, training=True)
    directions = {
        name: g.astype(str(compiled.get_types()[name]).rpartition(".")[2]) for name, g in slopes(plain(outputs)).items()
    }
    outputs, gradients = compiled.evaluate(params, {"input": x}, output_gradients=directions)
    again = compiled.evaluate(params, {"input": x}, output_gradients=directions)[1]
    same(plain(gradients), plain(again))
    return plain(outputs) | {f"gradient of {name}": g for name, g in plain(gradients).items()}


def same(first: Arrays, again: Arrays) -> None:
    for name in first:
        if not np.allclose(first[name], again[name], rtol=1e-4, atol=1e-5, equal_nan=True):
            raise Wrong(f"the second call with the same rows returns another {name}")


def expected_gradient(case: Any, params: Arrays) -> Arrays:
    """Compute gradients in the reference, and confirm them by a difference quotient in a random direction."""
    compiled = case.compile()
    params = typed(case, params)
    x = {"input": case.batch()}
    directions = {
        name: g.astype(str(compiled.get_types()[name]).rpartition(".")[2])
        for name, g in slopes(plain(compiled.evaluate(params, x, training=True))).items()
    }
    outputs, gradients = compiled.evaluate(params, x, output_gradients=directions)
    if case.double:
        confirm(compiled, params, x, directions, plain(gradients))
    return plain(outputs) | {f"gradient of {name}": g for name, g in plain(gradients).items()}


def confirm(compiled: Any, params: Arrays, x: Arrays, directions: Arrays, gradients: Arrays) -> None:
    rng, step = np.random.default_rng(1), 1e-6
    for name, value in params.items():
        if value.dtype.kind != "f":
            continue
        direction = rng.normal(size=value.shape)
        ends = []
        for sign in (1, -1):
            shifted = params | {name: value + sign * step * direction}
            outputs = plain(compiled.evaluate(shifted, x, training=True))
            ends.append(sum(float((directions[key] * outputs[key]).sum()) for key in directions))
        quotient = (ends[0] - ends[1]) / (2 * step)
        slope = float((gradients[name] * direction).sum()) if name in gradients else 0.0
        if not np.isclose(quotient, slope, rtol=1e-4, atol=1e-5):
            raise Wrong(f"gradient of {name} in the reference is {slope}, the difference quotient {quotient}")


# training


class Seen(ml.Callback):
    """Notes the numbers of the samples of each step, and stops fit at a step if told to."""

    def __init__(self, stop_at: int = 0, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.stop_at, self.error = stop_at, error
        self.place = ""  # a callback that stops fit
        self.numbers: list[np.ndarray] = []
        self.steps: list[list[np.ndarray]] = []
        self.waiting: list[np.ndarray] = []
        self.resumed = False

    def batch_begin(self, trainer: Any, batch: Any) -> None:
        if self.resumed:  # steps after the last checkpoint are lost with the process
            del self.steps[trainer.steps :]
            self.resumed, self.waiting = False, []
        self.numbers.append(np.asarray(batch["number"]).reshape(-1).copy())

    def batch_end(self, trainer: Any, report: Any) -> None:
        self.waiting.append(self.numbers[-1])

    def validation_begin(self, trainer: Any) -> None:
        self.strike(trainer, "validation_begin")

    def epoch_end(self, trainer: Any, row: Any) -> None:
        self.strike(trainer, "epoch_end")

    def strike(self, trainer: Any, place: str) -> None:
        if self.place == place:
            self.place = ""
            raise self.error("the row ends fit here")

    def step_end(self, trainer: Any, report: Any) -> None:
        self.steps.append(self.waiting)
        self.waiting = []
        if self.stop_at and len(self.steps) == self.stop_at:
            self.stop_at = 0
            raise self.error("the row ends fit here")


def loss(output: Any, target: Any) -> Any:
    return ml.ops.mean(ml.ops.square(output - target))


def data(case: Any, rows: int = BATCH) -> tuple[Any, Arrays]:
    x = case.batch(SAMPLES)
    y = (
        np.random.default_rng(7)
        .normal(size=(SAMPLES, *case.target))
        .astype(x.dtype if x.dtype.kind == "f" else "float32")
    )
    columns = {"input": x, "number": np.arange(SAMPLES), "real" if case.adversarial else "target": y}
    return ml.DataLoader(columns, batch_size=rows, shuffle=True, seed=3), columns


def trainer_of(case: Any, params: Arrays) -> Any:
    options = {**case.options, **case.training}
    shapes = {"input": list(case.axes)} if case.open else None
    recipe: Any = {"loss": loss, "params": typed(case, params)}
    model, optimizer = case.model, ml.SGD(RATE, momentum=MOMENTUM)
    if case.adversarial:
        model, optimizer = adversaries(case), dict.fromkeys(("critic*", "generator*"), optimizer)
        options |= {"frozen": f"generator.{case.frozen}"} if case.frozen else {}
        recipe["loss"] = {"critic*": critic_loss, "generator*": generator_loss}
        parameters = {f"generator.{name}": x for name, x in params.items()} | critic_params(case)
        recipe["params"] = typed(case, parameters)
    return ml.Trainer(
        model,
        optimizer,
        backend=case.backend,
        **recipe,
        progress=False,
        **({"shapes": shapes} if shapes else {}),
        **options,
    )


def train(case: Any, params: Arrays) -> Arrays:
    """Train two epochs, with the event of the row, and check that each sample is used once in each."""
    event = case.row.get("event", "none")
    trainer = trainer_of(case, params)
    loader, _ = data(case)
    seen = Seen()
    folder = case.shared / "run"
    if event == "none" or event == "threads":
        trainer.fit(loader, epochs=2, callbacks=[seen])
    elif event == "second_fit":
        trainer.fit(loader, epochs=1, callbacks=[seen])
        trainer.fit(loader, epochs=1, callbacks=[seen])
    elif event.startswith(("interrupt", "exception")):
        seen.error = KeyboardInterrupt if event.startswith("interrupt") else ZeroDivisionError
        seen.place = {"interrupt_epoch": "epoch_end", "exception_validation": "validation_begin"}.get(event, "")
        seen.stop_at = 0 if seen.place else 2
        validation = loader if event == "exception_validation" else None
        try:
            trainer.fit(loader, epochs=2, callbacks=[seen], validation=validation)
        except (KeyboardInterrupt, ZeroDivisionError):
            pass
        else:
            raise Wrong("fit swallows what a callback raises")
        trainer.evaluate(loader)
        trainer.fit(loader, epochs=2 - trainer.epoch, callbacks=[seen], validation=validation)
    else:
        seen.stop_at = 2
        try:
            trainer.fit(loader, epochs=2, callbacks=[ml.Checkpoint(str(folder), every=1), seen])
        except KeyboardInterrupt:
            pass
        if event == "resume_batch":
            loader, _ = data(case, 3)
        if event == "resume_engine":
            case.change_engine()
        if event == "resume_mesh":
            case.change_mesh()
        trainer, seen.resumed = trainer_of(case, params), True
        trainer.fit(loader, epochs=2, callbacks=[seen], resume=str(folder))
    case.seen = seen
    exactly_once(seen)
    result = plain(trainer.params)
    if not case.adversarial and len(trainer.predict(case.batch(5))) != 5:
        raise Wrong("predict of 5 rows returns another number of them")
    if case.training.get("ema"):
        result |= {f"average of {name}": x for name, x in plain(trainer.averaged).items()}
    if case.keeps_state:
        result |= {f"state {name}": x for name, x in plain(trainer.state).items() if x.dtype.kind == "f"}
    return result


def exactly_once(seen: Seen) -> None:
    counts = Counter(np.concatenate([n for step in seen.steps for n in step]).tolist())
    if counts != dict.fromkeys(range(SAMPLES), 2):
        wrong = {n: counts.get(n, 0) for n in range(SAMPLES) if counts.get(n, 0) != 2}
        raise Wrong(f"samples are not used once in each of two epochs: {wrong}")


def accumulate(case: Any, params: Arrays) -> Arrays:
    case.training["gradient_accumulation_steps"] = 2
    return train(case, params)


def average(case: Any, params: Arrays) -> Arrays:
    case.training |= {"ema": DECAY, "clip_norm": CLIP}
    return train(case, params)


WIDTH = 4  # of the critic


def adversaries(case: Any) -> Any:
    """Return a model of the generator, the model of the row, and a critic, which reads both kinds of rows."""
    from mithril.models import Linear, Model, Sequential, Tanh

    critic = Sequential(Linear(WIDTH, name="first"), Tanh(), Linear(1, name="last"), name="critic")
    gan, case.model.name = Model(), "generator"
    gan |= case.model(input="input", output="fake")
    gan |= critic(input="real", output="real_score")
    gan |= critic(input="fake", output="fake_score")
    return gan


def critic_loss(real_score: Any, fake_score: Any) -> Any:
    return ml.ops.mean(ml.ops.softplus(-real_score)) + ml.ops.mean(ml.ops.softplus(fake_score))


def generator_loss(fake_score: Any) -> Any:
    return ml.ops.mean(ml.ops.softplus(-fake_score))


def critic_params(case: Any) -> Arrays:
    rng, size = np.random.default_rng(11), case.target[-1]
    shapes = {"first.weight": (WIDTH, size), "first.bias": (WIDTH,), "last.weight": (1, WIDTH), "last.bias": (1,)}
    return {f"critic.{name}": short(rng.normal(size=shape)) for name, shape in shapes.items()}


def scores(critic: Arrays, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hidden = np.tanh(rows @ critic["critic.first.weight"].T + critic["critic.first.bias"])
    return hidden, hidden @ critic["critic.last.weight"].T + critic["critic.last.bias"]


def slopes_of_critic(critic: Arrays, rows: np.ndarray, sign: float) -> tuple[Arrays, np.ndarray]:
    """Return gradients of mean(softplus(sign * score)): of the critic's parameters, and of the rows."""
    hidden, score = scores(critic, rows)
    slope = sign / (1.0 + np.exp(-sign * score)) / score.size
    inner = slope * critic["critic.last.weight"] * (1.0 - hidden**2)
    flat = {name: x.reshape(-1, x.shape[-1]) for name, x in (("s", slope), ("h", hidden), ("i", inner), ("r", rows))}
    gradients = {
        "critic.first.weight": flat["i"].T @ flat["r"],
        "critic.first.bias": flat["i"].sum(0),
        "critic.last.weight": flat["s"].T @ flat["h"],
        "critic.last.bias": flat["s"].sum(0),
    }
    return gradients, inner @ critic["critic.first.weight"]


def adversarial(case: Any, params: Arrays) -> Arrays:
    case.adversarial = True
    return train(case, params)


def expected_adversarial(case: Any, params: Arrays) -> Arrays:
    """Repeat the steps that were seen: the critic first, then the generator against the new critic."""
    case.adversarial = True
    compiled = case.compile(shapes={"input": list(case.axes)})
    values = plain(typed(case, params)) | plain(critic_params(case))
    velocity = {name: np.zeros_like(x) for name, x in values.items()}
    _, columns = data(case)
    rounding = rounded_names(case, compiled)
    if case.rounded:
        rounding |= {name: False for name, x in critic_params(case).items() if x.ndim == 2 and x.shape[1] % BLOCK == 0}

    def update(gradients: Arrays) -> None:
        for name, g in gradients.items():
            if case.frozen and fnmatch.fnmatch(name, case.frozen):
                continue
            velocity[name] = MOMENTUM * velocity[name] + g
            values[name] = values[name] - RATE * velocity[name]

    for (numbers,) in case.seen.steps:
        x = {"input": columns["input"][numbers]}
        weights = rounded(values, rounding)
        generator = typed(case, {name: weights[name] for name in params})
        fake = plain(compiled.evaluate(generator, x, training=True))["output"]
        real_part = slopes_of_critic(weights, columns["real"][numbers], -1.0)[0]
        fake_part = slopes_of_critic(weights, fake, 1.0)[0]
        update({name: g + fake_part[name] for name, g in real_part.items()})
        slope = slopes_of_critic(rounded(values, rounding), fake, -1.0)[1]
        slope = slope.astype(np.float64 if case.double else np.float32)
        update(plain(compiled.evaluate(generator, x, output_gradients={"output": slope})[1]))
    return {name if name.startswith("critic.") else f"generator.{name}": x for name, x in values.items()}


def rounded_names(case: Any, compiled: Any) -> dict[str, bool]:
    """Return the weights that quantization-aware training rounds, and whether these are [in, out]."""
    names, graph = {}, compiled.graph
    for node in graph.nodes if case.rounded else ():
        if node.op.name not in ("linear", "matmul"):
            continue
        weight, input_major = node.operands[1], node.op.name == "matmul"
        producer = graph.producers.get(weight)
        if input_major and producer is not None and producer.op.name == "transpose":
            weight, input_major = producer.operands[0], False
        is_param = weight in {i.value for i in graph.with_role("param")} and weight.ndim == 2
        if is_param and weight.shape[0 if input_major else 1] % BLOCK == 0:
            names[weight.name] = input_major
    return names


def rounded(params: Arrays, names: dict[str, bool]) -> Arrays:
    """Round weights to multiples of a scale of each block: its largest magnitude / 127, in 16 bits."""
    result = dict(params)
    for name, input_major in names.items():
        rows = params[name].T if input_major else params[name]
        blocks = rows.reshape(-1, BLOCK)
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16).astype(blocks.dtype)
        scale[scale == 0] = 1
        values = (np.clip(np.round(blocks / scale), -128, 127) * scale).reshape(rows.shape)
        result[name] = values.T if input_major else values
    return result


def expected_training(case: Any, params: Arrays) -> Arrays:
    """Repeat the steps that were seen: mean squared error, SGD with momentum, clipping and averages, in NumPy."""
    compiled = case.compile(shapes={"input": list(case.axes)})
    rounding = rounded_names(case, compiled)
    params = typed(case, params)
    first = dict(params)
    frozen = {name for name in params if case.frozen and fnmatch.fnmatch(name, case.frozen)}
    _, columns = data(case)
    state = compiled.initial_state()
    velocity = {name: np.zeros_like(x) for name, x in params.items()}
    averages = {name: x.copy() for name, x in params.items()}
    clips, averaging = case.row["mode"] == "average", case.row["mode"] == "average"
    for number, step in enumerate(case.seen.steps, 1):
        total = {name: np.zeros_like(x) for name, x in params.items()}
        for numbers in step:
            x = {"input": columns["input"][numbers]}
            weights = rounded(params, rounding)
            y = np.asarray(compiled.evaluate(weights, x, state=state, training=True)[0]["output"])
            slope = (2 * (y - columns["target"][numbers]) / y.size).astype(y.dtype)
            _, gradients, state = compiled.evaluate(
                weights, x, output_gradients={"output": slope}, state=state, training=True
            )
            for name, g in gradients.items():
                total[name] += np.asarray(g) / len(step)
        moving = {name: g for name, g in total.items() if name not in frozen}
        if clips:
            norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in moving.values()))
            moving = {name: g * min(1.0, CLIP / norm) for name, g in moving.items()}
        for name, g in moving.items():
            velocity[name] = MOMENTUM * velocity[name] + g
            params[name] = (params[name] - RATE * velocity[name]).astype(params[name].dtype)
        if averaging:
            share = max(9 / (number + 9), 1 - DECAY)  # the first steps count more, as in the pages of the trainer
            averages = {name: (1 - share) * averages[name] + share * params[name] for name in params}
    if all(np.array_equal(first[name], params[name]) for name in params):
        raise Wrong("training changes nothing")
    result = plain(params)
    if averaging:
        result |= {f"average of {name}": x for name, x in plain(averages).items() if name not in frozen}
    if case.keeps_state:
        result |= {f"state {name}": x for name, x in plain(state).items() if x.dtype.kind == "f"}
    return result


# in other places


def module(case: Any, params: Arrays) -> Arrays:
    """Gradients by PyTorch's autograd."""
    import torch

    compiled = case.compile()
    compiled.bind(typed(case, params))
    net = compiled.to_module()
    kind = getattr(torch, str(compiled.get_types()["input"]).rpartition(".")[2])
    outputs = net(torch.from_numpy(case.batch()).to(kind))
    outputs = dict(outputs) if isinstance(outputs, dict) else {"output": outputs}
    sum((y * torch.from_numpy(slopes({"y": y})["y"]).to(y.dtype)).sum() for y in outputs.values()).backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return plain(outputs) | {f"gradient of {name}": g for name, g in plain(gradients).items()}


def function(case: Any, params: Arrays) -> Arrays:
    """Gradients by the framework's own transformation of functions."""
    tokens = {"types": {"input": ml.int32}} if case.network.tokens else {}  # JAX has no int64 unless it is enabled
    compiled = case.compile(**tokens)
    compiled.bind(typed(case, params))
    function, state = compiled.to_function(training=True), compiled.initial_state()
    kind = str(compiled.get_types()["input"]).rpartition(".")[2]

    def call(params: Any, inputs: Any) -> Any:
        return function(params, inputs, state)[0] if state else function(params, inputs)

    if case.row["engine"] == "jax":
        import jax

        array, grad = jax.numpy.asarray, jax.grad
    else:
        import mlx.core as mx

        array, grad = mx.array, mx.grad
    x = {"input": array(case.batch().astype(kind if kind.startswith(("float16", "int")) else np.float32))}
    if kind == "bfloat16":
        x["input"] = x["input"].astype("bfloat16" if case.row["engine"] == "jax" else mx.bfloat16)
    outputs = call(compiled.params, x)
    directions = {name: array(g.astype(np.float32)) for name, g in slopes(plain(outputs)).items()}
    types = compiled.get_types()  # bind keeps arrays of NumPy, which mx.grad does not take
    arrays = {n: compiled.backend.array(p, dtype=types[n]) for n, p in compiled.params.items()}
    gradients = grad(lambda p: sum((y * directions[name]).sum() for name, y in call(p, x).items()))(arrays)
    return plain(outputs) | {f"gradient of {name}": g for name, g in plain(gradients).items()}


def safetensors(case: Any, params: Arrays) -> Arrays:
    compiled = case.compile(inference=True)
    compiled.bind(typed(case, params)).save(case.folder / "weights.safetensors")
    again = case.compile(inference=True).load(case.folder / "weights.safetensors")
    return called_again(lambda rows: again({"input": rows}), case.batch(), case)


def as_input(compiled: Any, rows: np.ndarray) -> np.ndarray:
    """Cast rows to the dtype of the input: files of 16-bit programs expect it."""
    kind = str(compiled.get_types().get("input", rows.dtype)).rpartition(".")[2]
    return rows.astype(kind if kind in ("float16", "bfloat16") else rows.dtype)


def to_onnx(case: Any, params: Arrays) -> Arrays:
    compiled = case.compile(inference=True)
    compiled.bind(typed(case, params)).export(case.folder / "exported.onnx")
    again = ml.compile(ml.from_onnx(case.folder / "exported.onnx"), case.backend, inference=True)
    return called_again(lambda rows: again({"input": as_input(again, rows)}), case.batch(), case)


def to_json(case: Any, params: Arrays) -> Arrays:
    case.model = type(case.model).from_json(case.model.to_json(), layers=CUSTOM)
    return infer(case, params)


def to_gguf(case: Any, params: Arrays) -> Arrays:
    compiled = case.compile(inference=True)
    compiled.bind(typed(case, params)).export(case.folder / "exported.gguf")
    again = ml.load(case.folder / "exported.gguf")
    return called_again(lambda rows: again({"input": as_input(again, rows)}), case.batch(), case)


# decoders


def to_llama(case: Any, params: Arrays) -> Arrays:
    """Write a file in the layout of llama.cpp, and run it on the engine."""
    compiled = case.compile(inference=True)
    compiled.bind(typed(case, params)).export(case.folder / "exported.gguf", architecture="llama")
    again = ml.load(case.folder / "exported.gguf", backend=case.backend)
    return called_again(lambda rows: again({"input_ids": rows}), case.batch(), case)


def expected_of_decoder(case: Any, params: Arrays) -> Arrays:
    return plain(case.compile(inference=True).evaluate(typed(case, params), {"input_ids": case.batch()}))


def generate(case: Any, params: Arrays) -> Arrays:
    """Continue the rows as prompts, by the cache."""
    shapes = {"input_ids": [None, None], "position": [None]}  # which programs with embedded parameters need
    compiled = ml.compile(case.model, case.backend, inference=True, shapes=shapes, **case.options)
    compiled.bind(typed(case, params))
    case.seen = np.array(ml.generate(compiled, case.batch().tolist(), max_new_tokens=NEW, stop=()))
    again = ml.generate(compiled, case.batch().tolist(), max_new_tokens=NEW, stop=())
    return {"tokens": case.seen, "tokens of the second call": np.array(again)}


def expected_tokens(case: Any, params: Arrays) -> Arrays:
    """Read each text again without a cache: a token is right if no other one is clearly more probable."""
    text = np.concatenate([case.batch(), case.seen], axis=1).astype(np.int32)
    compiled = case.compile(shapes={"input_ids": list(text.shape)})
    logits = plain(compiled.evaluate(typed(case, params), {"input_ids": text}, training=True))["logits"]
    logits = logits[:, -NEW - 1 : -1]
    scores = np.take_along_axis(logits, case.seen[..., None].astype(int), -1)[..., 0]
    is_close = scores >= logits.max(-1) - 2 * case.tolerance * np.abs(logits).max()
    tokens = np.where(is_close, case.seen, logits.argmax(-1))
    return {"tokens": tokens, "tokens of the second call": tokens}


MODES = {
    "infer": Mode(infer, expected_outputs),
    "gradient": Mode(gradient, expected_gradient),
    "train": Mode(train, expected_training),
    "accumulate": Mode(accumulate, expected_training),
    "average": Mode(average, expected_training),
    "module": Mode(module, expected_gradient),
    "function": Mode(function, expected_gradient),
    "safetensors": Mode(safetensors, expected_outputs),
    "to_onnx": Mode(to_onnx, expected_outputs),
    "to_json": Mode(to_json, expected_outputs),
    "to_gguf": Mode(to_gguf, expected_outputs),
    "adversarial": Mode(adversarial, expected_adversarial),
    "generate": Mode(generate, expected_tokens),
    "to_llama": Mode(to_llama, expected_of_decoder),
}
