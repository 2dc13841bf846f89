"""Cells and unrolled recurrent models; the rows of a batch are sorted by falling length."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from mithril import ModelError, ops
from mithril_compat.language.block import WEIGHT, Leaf, block
from mithril_compat.language.connection import TBD, Connection
from mithril_compat.language.model import Model
from mithril_compat.layers.elementwise import Concat
from mithril_compat.layers.neural import linear
from mithril_compat.lowering import fill


class Cell(Leaf):
    """A step of a recurrent model: parameters, states and the output by name."""

    shared_keys: tuple[str, ...] = ()
    state_keys: tuple[str, ...] = ("hidden",)
    out_key = "output"


@block(outputs="hidden hidden_compl output", couts="output")
def _rnn(input: Any = TBD, w_ih: Any = WEIGHT, w_hh: Any = WEIGHT, w_ho: Any = WEIGHT, bias_h: Any = WEIGHT,
         bias_o: Any = WEIGHT, prev_hidden: Any = TBD, *, program: Any) -> Any:  # fmt: skip
    rows, size = input.shape[0], prev_hidden.shape[-1]
    before = prev_hidden[:rows]
    recurrent = ops.linear(before, fill(w_hh, (size, size)))
    new = ops.linear(input, fill(w_ih, (size, input.shape[-1])), fill(bias_h, (size,)))
    hidden = ops.tanh(recurrent + new)
    return hidden, prev_hidden[rows:], linear(hidden, w_ho, bias_o, None, program)


def _gates(x: Any, hidden: Any, cell: Any, weights: dict[str, Any], biases: dict[str, Any]) -> tuple[Any, Any]:
    size = hidden.shape[-1]
    operand = ops.concat(x, hidden, axis=-1)
    gate = {
        key: ops.linear(operand, fill(weights[key], (size, operand.shape[-1])), fill(biases[key], (size,)))
        for key in weights
    }
    new = cell * ops.sigmoid(gate["f"]) + ops.sigmoid(gate["i"]) * ops.tanh(gate["c"])
    return new, ops.tanh(new) * ops.sigmoid(gate["o"])


@block(outputs="output", cins="prev_cell")
def LSTMCellBody(input: Any = TBD, prev_hidden: Any = TBD, prev_cell: Any = TBD, w_i: Any = WEIGHT, w_f: Any = WEIGHT,
                 w_c: Any = WEIGHT, w_o: Any = WEIGHT, bias_f: Any = WEIGHT, bias_i: Any = WEIGHT,
                 bias_c: Any = WEIGHT, bias_o: Any = WEIGHT) -> Any:  # fmt: skip
    weights, biases = {"f": w_f, "i": w_i, "c": w_c, "o": w_o}, {"f": bias_f, "i": bias_i, "c": bias_c, "o": bias_o}
    return ops.concat(*_gates(input, prev_hidden, prev_cell, weights, biases), axis=0)


@block(outputs="hidden cell hidden_compl output", couts="output")
def _lstm(input: Any = TBD, w_i: Any = WEIGHT, w_f: Any = WEIGHT, w_c: Any = WEIGHT, w_o: Any = WEIGHT,
          w_out: Any = WEIGHT, bias_f: Any = WEIGHT, bias_i: Any = WEIGHT, bias_c: Any = WEIGHT,
          bias_o: Any = WEIGHT, bias_out: Any = WEIGHT, prev_hidden: Any = TBD, prev_cell: Any = TBD,
          *, program: Any) -> Any:  # fmt: skip
    rows = input.shape[0]
    weights, biases = {"f": w_f, "i": w_i, "c": w_c, "o": w_o}, {"f": bias_f, "i": bias_i, "c": bias_c, "o": bias_o}
    cell, hidden = _gates(input, prev_hidden[:rows], prev_cell[:rows], weights, biases)
    return hidden, cell, prev_hidden[rows:], linear(hidden, w_out, bias_out, None, program)


class RNNCell(Cell, _rnn):  # type: ignore[misc, valid-type]
    """A simple recurrent cell with a linear output."""

    shared_keys = ("w_ih", "w_hh", "w_ho", "bias_h", "bias_o")


class LSTMCell(Cell, _lstm):  # type: ignore[misc, valid-type]
    """A cell with long short-term memory and a linear output."""

    shared_keys = ("w_f", "w_i", "w_o", "w_c", "w_out", "bias_f", "bias_i", "bias_o", "bias_c", "bias_out")
    state_keys = ("hidden", "cell")


class RNN(Model):
    """Base of the unrolled models."""

    def __init__(self, cell_type: Cell, *, name: str | None = None) -> None:
        super().__init__(name)
        self.cell_type = cell_type

    def step(self, previous: Cell | None, input: Any, output: str, values: dict[str, Any]) -> Cell:
        """Add one cell with the shared parameters and the states of the one before."""
        cell = deepcopy(self.cell_type)
        targets: dict[str, Any] = {key: key for key in cell.shared_keys}
        for key in cell.state_keys:
            initial = f"initial_{key}"
            targets[f"prev_{key}"] = (
                previous.edges[key] if previous is not None else Connection(initial, value=values.get(initial, TBD))
            )
        self.join(cell, {**targets, "input": input, cell.out_key: output})
        self._expose(self.edges[output].edge, output)
        return cell

    def finish(self, cins: list[str], cout: Connection) -> None:
        """Set the usual terminals and freeze the model."""
        self.cins, self.couts = [self.edges[key].edge for key in cins], [cout.edge]
        self._freeze()


class OneToMany(RNN):
    """A sequence from one input: each step reads the output, or the target, of the step before."""

    def __init__(
        self, cell_type: Cell, max_sequence_length: int, teacher_forcing: bool = False, input: Any = TBD,
        *, name: str | None = None, **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(cell_type, name=name)
        cell = self.step(None, Connection("input", value=input), "output0", given)
        for k in range(1, max_sequence_length):
            source: Any = f"target{k - 1}" if teacher_forcing else cell.edges[cell.out_key]
            rows = FirstRows()
            self.join(rows, {"input": source, "like": f"target{k}"})
            cell = self.step(cell, rows.edges["output"], f"output{k}", given)
        self.finish(["input"], cell.edges["output"])


class OneToManyInference(RNN):
    """A sequence from one input: each step reads the output of the step before."""

    def __init__(
        self, cell_type: Cell, max_sequence_length: int, input: Any = TBD, *, name: str | None = None, **given: Any
    ) -> None:
        super().__init__(cell_type, name=name)
        cell = self.step(None, Connection("input", value=input), "output0", given)
        for k in range(1, max_sequence_length):
            cell = self.step(cell, cell.edges[cell.out_key], f"output{k}", given)
        self.finish(["input"], cell.edges["output"])


class ManyToOne(RNN):
    """Outputs of all steps, and the last hidden state of each row as ``hidden_concat``."""

    def __init__(
        self, cell_type: Cell, max_sequence_length: int, hidden_concat: Any = TBD,
        *, name: str | None = None, **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(cell_type, name=name)
        cell: Cell | None = None
        last: list[Connection] = []  # states of rows that ended before a step, in the predecessor's order
        for k in range(max_sequence_length):
            source = Connection(f"input{k}", value=given.get(f"input{k}", TBD))
            cell = self.step(cell, source, f"output{k}", given)
            if k:
                last += [cell.edges["hidden"]] * (k == max_sequence_length - 1) + [cell.edges["hidden_compl"]]
        if cell is None:
            raise ModelError("a sequence needs at least one step")
        concat = Concat()
        self.join(concat, {"input": last or [cell.edges["hidden"]], "output": "hidden_concat"})
        self._expose(self.edges["hidden_concat"].edge, "hidden_concat")
        self.finish(["input0"], self.edges["hidden_concat"])


@block()
def FirstRows(input: Any = TBD, like: Any = TBD) -> Any:
    """Return as many rows as another tensor has."""
    return input if input.shape[0] == like.shape[0] else input[: like.shape[0]]


def _coupled(model: Model, encoder: RNN, decoder: RNN, hidden: Any) -> None:
    model.join(encoder, {key: key for key in encoder.input_keys})
    initial = hidden()
    targets: dict[str, Any] = {
        key: key if key.startswith("target") else f"decoder_{key}"
        for key in decoder.input_keys
        if key != "initial_hidden"
    }
    targets |= {key: key for key in decoder.exposed}
    model.join(decoder, {**targets, "initial_hidden": initial})
    for key in decoder.exposed:
        model._expose(model.edges[key].edge, key)
    model.cins = [model.edges[key].edge for key in ("input0", "decoder_input")]
    model.couts = [decoder.couts[0].edge]
    model._freeze()


class EncoderDecoder(Model):
    """A ManyToOne whose hidden states, in another order, start a OneToMany."""

    def __init__(
        self, cell_type: Cell, max_input_sequence_length: int, max_target_sequence_length: int,
        teacher_forcing: bool = False, indices: Any = TBD, *, name: str | None = None,
    ) -> None:  # fmt: skip
        from mithril_compat.layers.elementwise import PermuteTensor

        super().__init__(name)
        encoder = ManyToOne(cell_type, max_input_sequence_length)

        def permuted() -> Connection:
            order = PermuteTensor()
            targets = {"input": encoder.edges["hidden_concat"], "indices": Connection("indices", value=indices)}
            self.join(order, targets)
            return order.edges["output"]

        decoder = OneToMany(cell_type, max_target_sequence_length, teacher_forcing)
        _coupled(self, encoder, decoder, permuted)


class EncoderDecoderInference(Model):
    """A ManyToOne whose hidden states start a decoder that reads its own outputs."""

    def __init__(
        self, cell_type: Cell, max_input_sequence_length: int, max_target_sequence_length: int,
        *, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name)
        encoder = ManyToOne(cell_type, max_input_sequence_length)
        decoder = OneToManyInference(cell_type, max_target_sequence_length)
        _coupled(self, encoder, decoder, lambda: encoder.edges["hidden_concat"])
