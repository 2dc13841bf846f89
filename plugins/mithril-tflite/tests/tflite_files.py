"""Files of TensorFlow Lite, written from Python: tensors, operators and options by the slots of the schema."""

from __future__ import annotations

import struct

import numpy as np

from mithril_tflite.schema import NAMES, OPTIONS

TYPES = {
    "float32": 0,
    "float16": 1,
    "int32": 2,
    "uint8": 3,
    "int64": 4,
    "bool": 6,
    "int16": 7,
    "int8": 9,
    "float64": 10,
}


class Table(dict):
    """Fields by slot: (kind of struct, number), a Table, a text, an array, or a list of tables."""


class Writer:
    """A flatbuffer, written front to back: objects follow the table that refers to them."""

    def __init__(self):
        self.data = bytearray()
        self.tables = {}  # positions by table: one that occurs again is not written again

    def align(self, size, extra=0):
        self.data += bytes(-(len(self.data) + extra) % size)

    def table(self, t):
        kinds = {slot: v[0] if isinstance(v, tuple) else "I" for slot, v in t.items()}
        self.align(8)
        slots = max(t, default=-1) + 1
        vtable = len(self.data)
        self.data += bytes(4 + 2 * slots)
        self.align(8)
        start = len(self.data)
        self.data += struct.pack("<i", start - vtable)
        places = {}
        for slot, kind in sorted(kinds.items(), key=lambda item: -struct.calcsize(item[1])):
            self.align(struct.calcsize(kind))
            places[slot] = len(self.data)
            self.data += struct.pack(f"<{kind}", t[slot][1]) if isinstance(t[slot], tuple) else bytes(4)
            struct.pack_into("<H", self.data, vtable + 4 + 2 * slot, places[slot] - start)
        struct.pack_into("<HH", self.data, vtable, 4 + 2 * slots, len(self.data) - start)
        for slot, value in t.items():
            if not isinstance(value, tuple):
                position = self.child(value)
                struct.pack_into("<I", self.data, places[slot], position - places[slot])
        return start

    def child(self, value):
        if isinstance(value, Table):
            if id(value) not in self.tables:
                self.tables[id(value)] = self.table(value)
            return self.tables[id(value)]
        if isinstance(value, list):
            self.align(4)
            start = len(self.data)
            self.data += struct.pack("<I", len(value)) + bytes(4 * len(value))
            for k, item in enumerate(value):
                place = start + 4 + 4 * k
                struct.pack_into("<I", self.data, place, self.child(item) - place)
            return start
        raw = value.encode() if isinstance(value, str) else np.asarray(value).tobytes()
        count = len(raw) if isinstance(value, str) else np.asarray(value).size
        self.align(16, extra=4)
        start = len(self.data)
        self.data += struct.pack("<I", count) + raw + (b"\0" if isinstance(value, str) else b"")
        return start


def written(root):
    """Return the bytes of a file with this root."""
    writer = Writer()
    writer.data += bytes(8)
    position = writer.table(root)
    writer.align(16)
    struct.pack_into("<I4s", writer.data, 0, position, b"TFL3")
    return bytes(writer.data)


class Model:
    """A file under construction."""

    def __init__(self):
        self.buffers = [b""]
        self.codes = []
        self.graphs = []
        self.signatures = []

    def graph(self, name="main"):
        self.graphs.append(Graph(self, name))
        return self.graphs[-1]

    def bytes(self, version=1):
        codes = [
            Table(
                {0: ("b", min(c, 127)), 2: ("i", version), 3: ("i", c)}
                if isinstance(c, int)
                else {0: ("b", 32), 1: c, 3: ("i", 32)}
            )
            for c in self.codes
        ]
        buffers = [Table({0: np.frombuffer(b, np.uint8)} if b else {}) for b in self.buffers]
        root = Table({0: ("I", 3), 1: codes, 2: [g.table() for g in self.graphs], 3: "test", 4: buffers})
        if self.signatures:
            root[7] = self.signatures
        return written(root)

    def signature(self, key, inputs, outputs, graph=0):
        def maps(names):
            return [Table({0: name, 1: ("I", index)}) for name, index in names.items()]

        self.signatures.append(Table({0: maps(inputs), 1: maps(outputs), 2: key, 4: ("I", graph)}))


class Graph:
    def __init__(self, model, name):
        self.model, self.name = model, name
        self.tensors, self.operators, self.inputs, self.outputs = [], [], [], []

    def tensor(self, shape, dtype="float32", name="", scale=None, zero=0, axis=0, signature=None, **fields):
        """Add a tensor without a value; a shape of None is unknown."""
        name = name or f"t{len(self.tensors)}"
        t = Table({1: ("b", TYPES.get(dtype, dtype)), 2: ("I", fields.get("buffer", 0)), 3: name})
        if shape is not None:
            t |= {0: np.asarray(shape, np.int32), 8: ("?", True)}
        if signature is not None:
            t[7] = np.asarray(signature, np.int32)
        if scale is not None:
            scales = np.atleast_1d(np.asarray(scale, np.float32))
            zeros = np.broadcast_to(np.asarray(zero, np.int64), scales.shape)
            t[4] = Table({2: scales, 3: zeros, 6: ("i", axis)})
        if fields.get("variable"):
            t[5] = ("?", True)
        self.tensors.append(t)
        return len(self.tensors) - 1

    def input(self, shape, dtype="float32", **fields):
        self.inputs.append(self.tensor(shape, dtype, **fields))
        return self.inputs[-1]

    def constant(self, array, **fields):
        array = np.asarray(array)
        self.model.buffers.append(array.tobytes())
        dtype = fields.pop("dtype", array.dtype.name)
        return self.tensor(array.shape, dtype, buffer=len(self.model.buffers) - 1, **fields)

    def operator(self, name, operands, results, union=None, slots=None, **options):
        """Add an operator; ``slots`` are options that only the interpreter reads, in the table ``union``."""
        code = NAMES.index(name) if name in NAMES else name
        if code not in self.model.codes:
            self.model.codes.append(code)
        t = Table({0: ("I", self.model.codes.index(code))})
        t[1], t[2] = (np.asarray([-1 if k is None else k for k in v], np.int32) for v in (operands, results))
        if name in OPTIONS or union:
            kind, text = OPTIONS.get(name, (union, ""))
            fields = Table(slots or {})
            for slot, field in enumerate(text.split()):
                label, _, rest = field.partition(":")
                if label in options:
                    value, letter = options.pop(label), rest.partition("=")[0]
                    text_or_array = value if letter == "s" else np.asarray(value, np.int32)
                    fields[slot] = text_or_array if letter in ("s", "*i") else (letter, value)
            t |= {3: ("B", kind), 4: fields}
        assert not options, options
        self.operators.append(t)
        return results

    def table(self):
        fields = {0: self.tensors, 3: self.operators, 4: self.name}
        fields[1], fields[2] = (np.asarray(v, np.int32) for v in (self.inputs, self.outputs))
        return Table(fields)


def interpreter_of(model):
    """Return the interpreter of a file with kernels of the first version that has the types of its operands."""
    import pytest

    module = pytest.importorskip("ai_edge_litert.interpreter")
    kernels = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    errors = []
    for version in range(1, 13):
        try:
            run = module.Interpreter(model_content=model.bytes(version), experimental_op_resolver_type=kernels)
            run.allocate_tensors()
            return run
        except (ValueError, RuntimeError) as error:
            errors.append(error)
    raise errors[0]


def interpreted(model, inputs, calls=1):
    """Return the outputs that the interpreter computes, in the order of the file; for several calls those of each."""
    run = interpreter_of(model)
    results = []
    for _ in range(calls):
        for details, x in zip(run.get_input_details(), inputs, strict=True):
            run.set_tensor(details["index"], x)
        run.invoke()
        results.append([run.get_tensor(details["index"]) for details in run.get_output_details()])
    return results[-1] if calls == 1 else results
