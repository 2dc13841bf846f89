"""Methods that plugins add to compiled models; their types are in a stub, which is generated from the registry."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Never

from mithril import plugins
from mithril.backend import annotated

# Methods of compiled models elsewhere, separated by spaces, and the way here.
ELSEWHERE = {
    "fit train train_on_batch": "ml.Trainer(model, ml.Adam(), loss=...).fit(x, y)",
    "predict forward apply run": "compiled.evaluate(params, inputs), or compiled(inputs) after compiled.bind(params)",
    "gradients grad evaluate_gradients backward": "compiled.evaluate(params, inputs, output_gradients=...)",
    "parameters state_dict get_weights weights": "compiled.params, or compiled.randomize_params(seed=0)",
    "init init_params initialize": "compiled.randomize_params(seed=0)",
    "load_weights set_weights": "compiled.load_state_dict(arrays)",
    "save_weights": "compiled.save(path)",
    "to_onnx": "compiled.export('model.onnx')",
    "profile": "profile=True of ml.compile, and compiled.get_profile_stats()",
    "shapes input_shapes input_shape": "compiled.get_shapes()",
    "types dtypes": "compiled.get_types()",
    "code source_code": "file_path='net.py' of ml.compile",
    "to cuda cpu": "the backend of ml.compile: ml.TorchBackend(device='cuda')",
    "eval": "inference=True of ml.compile",
    "half float bfloat16": "precision= of ml.compile",
    "freeze": "trainable= of ml.compile, or frozen= of ml.Trainer",
}


class PluginMethod:
    """A method that a plugin adds with ``Export(name, loads, on="CompiledModel")``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, compiled: Any, owner: type) -> Any:
        if compiled is None:
            return self
        function, plugin = plugins.extension("CompiledModel", self.name)
        return partial(annotated(function, f"the method '{self.name}'", plugin), compiled)


class MethodElsewhere:
    """A name that users of other frameworks expect: its access is an error with the way here."""

    def __init__(self, name: str, instead: str) -> None:
        self.name = name
        self.instead = instead

    def __get__(self, compiled: Any, owner: type) -> Never:
        text = f"'{owner.__name__}' object has no attribute '{self.name}'; use {self.instead}"
        raise AttributeError(text, name=self.name, obj=compiled)


class PluginMethods:
    """Base of compiled models. A ``__getattr__`` would make access to any attribute slower."""

    _generation: ClassVar[object] = None  # of the plugins whose methods the class has

    def __dir__(self) -> Iterable[str]:
        hidden = {name for base in type(self).__mro__ for name, x in vars(base).items() if type(x) is MethodElsewhere}
        return [name for name in super().__dir__() if name not in hidden]

    @classmethod
    def add_plugin_methods(cls) -> None:
        """Add the methods of plugins to the class, once for each generation of the plugins."""
        generation = plugins.generation()
        if vars(cls).get("_generation") is generation:
            return
        methods: dict[str, Any] = {
            name: MethodElsewhere(name, text) for words, text in ELSEWHERE.items() for name in words.split()
        }
        methods |= {name: PluginMethod(name) for name in (*plugins.extensions(), *plugins.pip_hints.METHODS)}
        for name, method in methods.items():
            present = inspect.getattr_static(cls, name, None)
            if present is None or type(present) is MethodElsewhere:
                setattr(cls, name, method)
        cls._generation = generation
