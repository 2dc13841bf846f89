"""Example inputs of modules of transformers, and which of their sizes are open."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

from mithril.graph import UnsupportedError

BATCH, LENGTH, OTHER_LENGTH = 2, 7, 5  # different, and more than 1: torch.export fixes sizes of 0 and 1
SAMPLES, FRAMES = 4000, 64  # of sound: longer than the kernels of all convolutions together
DEFAULTS = {"attention_mask": 1, "token_type_ids": 0}  # the elements of inputs that a call may leave out


class Example(NamedTuple):
    """An example input: its shape, whether it has tokens, and the names of its open sizes by axis."""

    shape: tuple[int, ...]
    is_tokens: bool
    names: dict[int, str]


def examples(module: Any) -> dict[str, Example]:
    """Return the example inputs of a module by name."""
    config, accepted = module.config, signature(module.forward).parameters
    main = module.main_input_name
    inputs: dict[str, Example] = {}
    if main == "input_ids":
        inputs["input_ids"] = _tokens(LENGTH, "length")
        inputs["attention_mask"] = _tokens(LENGTH, "length")
        if (getattr(config, "type_vocab_size", 0) or 0) > 1:
            inputs["token_type_ids"] = _tokens(LENGTH, "length")
    compares = "return_loss" in accepted or hasattr(module, "logit_scale")  # an image and a text
    if main == "pixel_values" or compares:
        inputs["pixel_values"] = _images(config)
    if main in SOUNDS:
        inputs[main] = SOUNDS[main](config)
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _tokens(OTHER_LENGTH, "decoder_length")
    inputs = {name: example for name, example in inputs.items() if name in accepted}
    if main not in inputs:
        raise UnsupportedError(
            f"{type(module).__name__} reads '{main}': from_pretrained knows no example of it",
            facts=["known: input_ids, pixel_values, input_values, input_features"],
            hint="create the module by transformers, and import it by ml.from_torch(module, example_inputs)",
        )
    return inputs


def _tokens(length: int, name: str) -> Example:
    return Example((BATCH, length), True, {0: "batch", 1: name})


def _images(config: Any) -> Example:
    """Return images of the size of the configuration, or of open size if it has none."""
    part = getattr(config, "vision_config", None) or config
    size = _first(part, "image_size", "img_size")
    channels = _first(part, "num_channels", "in_channels", "in_chans") or 3
    names = {0: "batch"} if size else {0: "batch", 2: "height", 3: "width"}
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, (tuple, list)) else (size or 64, size or 96)
    frames = _first(part, "num_frames")
    shape = (BATCH, channels, height, width) if frames is None else (BATCH, frames, channels, height, width)
    return Example(shape, False, names)


def _waves(config: Any) -> Example:
    bins = _first(config, "num_mel_bins")
    if bins and hasattr(config, "max_length"):  # a spectrogram of fixed size
        return Example((BATCH, config.max_length, bins), False, {0: "batch"})
    return Example((BATCH, SAMPLES), False, {0: "batch", 1: "samples"})


def _spectra(config: Any) -> Example:
    bins = _first(config, *BINS) or 80
    positions = _first(config, "max_source_positions")
    if positions and not hasattr(config, "input_feat_per_channel"):  # of Whisper, which reads all of them
        return Example((BATCH, bins, 2 * positions), False, {0: "batch"})
    return Example((BATCH, FRAMES, bins), False, {0: "batch", 1: "frames"})


BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim")
SOUNDS: dict[str, Callable[[Any], Example]] = {"input_values": _waves, "input_features": _spectra}


def _first(config: Any, *names: str) -> Any:
    return next((value for n in names if (value := getattr(config, n, None)) is not None), None)
