"""Settings of ``config.json``: each is read, known to be neutral, or refused by its name."""

import json

import pytest
from checkpoints import read_record, write_folder
from record import DECODERS

import mithril as ml
from mithril_hub.decoder.families import decoder_config
from mithril_hub.settings import KNOWN, check_settings, size_of

REFUSED = {  # settings that change the results of transformers
    "gemma": {"use_bidirectional_attention": True, "hidden_activation": "silu"},
    "gemma2": {"use_bidirectional_attention": True},
    "gemma3": {"use_bidirectional_attention": True, "attn_logit_softcapping": 20.0},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "bert": {"is_decoder": True},
    "roberta": {"position_embedding_type": "relative_key"},
    "vit": {"qkv_bias": False},
    "whisper": {"tie_word_embeddings": False},
    "distilbert": {"layer_norm_eps": 0.1},
    "llama2": {"sliding_window": 8, "a_setting_of_tomorrow": 1, "partial_rotary_factor": 0.5},
    "mistral": {"layer_types": ["full_attention", "sliding_attention"]},
    "t5": {"quantization_config": {"bits": 4}},
}

# Values with the meaning of files without the setting.
NEUTRAL = {
    "vit": {"pruned_heads": {}, "is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False}
    | {"tie_encoder_decoder": False, "attention_bias": False, "mlp_bias": False, "rope_interleaved": False}
    | {"use_mrope": False, "partial_rotary_factor": 1.0, "qkv_bias": True},
    "t5": {"is_encoder_decoder": True},
    "whisper": {"is_encoder_decoder": True, "tie_word_embeddings": True},
    "gemma2": {"use_bidirectional_attention": False, "hidden_act": "gelu_pytorch_tanh"},
}


@pytest.mark.parametrize("family", NEUTRAL)
def test_only_the_neutral_value_of_a_setting_is_accepted(family):
    check_settings(family, NEUTRAL[family])
    for name, value in NEUTRAL[family].items():
        other = not value if isinstance(value, bool) else [value, value]
        with pytest.raises(ml.UnsupportedError, match=f"do not support: {name}"):
            check_settings(family, {name: other})


@pytest.mark.parametrize("value", [1, (1 << 31) - 1])
def test_sizes_are_positive_and_have_31_bits(value):
    assert size_of({"size": value}, "size") == size_of({}, "size", value) == value
    for other in (0, -1, 1 << 31, True, 1.0, "1"):
        with pytest.raises(ml.InputError, match="'size' is .*, expected a positive integer"):
            size_of({"size": other}, "size")


@pytest.mark.parametrize("family", REFUSED)
def test_a_setting_that_is_not_supported_is_refused_by_its_name(family, tmp_path):
    record, settings = read_record(family), REFUSED[family]
    folder = write_folder(tmp_path / "m", record["config"] | settings, record["shapes"])
    with pytest.raises(ml.UnsupportedError) as caught:
        ml.from_pretrained(folder)
    assert all(f"{name}: {value!r}" in str(caught.value) for name, value in settings.items())


def test_settings_of_both_encoders_of_clip_are_checked(tmp_path):
    record = read_record("clip")
    config = record["config"] | {"vision_config": record["config"]["vision_config"] | {"use_head": True}}
    folder = write_folder(tmp_path / "m", config, record["shapes"])
    with pytest.raises(ml.UnsupportedError, match="the vision_config of config.json has settings .*: use_head"):
        ml.from_pretrained(folder)


def test_a_decoder_with_the_head_of_another_task_is_refused(tmp_path):
    record = read_record("gemma")
    config = record["config"] | {"architectures": ["GemmaForSequenceClassification"]}
    with pytest.raises(ml.UnsupportedError, match="is that of a GemmaForSequenceClassification"):
        ml.from_pretrained(write_folder(tmp_path / "m", config, record["shapes"]))


@pytest.mark.parametrize("family", ["llama2", "t5"])
def test_null_and_neutral_settings_are_accepted(family, tmp_path):
    record = read_record(family)
    neutral = {"attention_dropout": 0.5, "a_setting_of_tomorrow": None, "use_cache": False, "num_beams": 4}
    ml.from_pretrained(write_folder(tmp_path / "m", record["config"] | neutral, record["shapes"]))


def test_parameters_of_positions_are_checked():
    settings = read_record("llama2")["config"]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    with pytest.raises(ml.UnsupportedError, match="not supported: mrope_section"):
        decoder_config(settings | {"rope_parameters": rope})
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    with pytest.raises(ml.UnsupportedError, match="do not support: partial_rotary_factor"):
        decoder_config(settings | {"rope_parameters": rope})
    rope = {"rope_theta": 1e5, "full_attention": {"rope_theta": 1e4}}
    with pytest.raises(ml.UnsupportedError, match="next to those of one kind: rope_theta"):
        decoder_config(read_record("qwen2")["config"] | {"rope_parameters": rope})
    with pytest.raises(ml.UnsupportedError, match="'layer_types' has 'chunked_attention'"):
        decoder_config(read_record("qwen2")["config"] | {"layer_types": ["chunked_attention"] * 2})


DEFAULTS = {  # of transformers, for settings that a file leaves out
    "mistral": {"windows": (4096, 4096)},
    "mixtral": {"eps": 1e-5, "windows": (None, None)},
    "phi3": {"eps": 1e-5, "longest": 4096},
    "gemma2": {"attention_cap": 50.0, "logit_cap": 30.0, "windows": (4096, None)},
    "gemma3": {"attention_cap": 0.0, "logit_cap": 0.0, "windows": (4096, 4096)},
    "qwen2": {"windows": (None, None)},
}


@pytest.mark.parametrize("family", DEFAULTS)
def test_settings_that_a_file_leaves_out_have_the_defaults_of_transformers(family):
    needed = "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim"
    settings = {k: v for k, v in read_record(family)["config"].items() if k in needed.split()}
    settings |= {"sliding_window": 8} if family == "qwen2" else {}  # without use_sliding_window
    config = decoder_config(settings)
    assert {name: getattr(config, name) for name in DEFAULTS[family]} == DEFAULTS[family]


def test_bases_of_positions_that_a_file_leaves_out():
    needed = "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim"
    settings = {
        f: {k: v for k, v in read_record(f)["config"].items() if k in needed.split()} for f in ("mixtral", "gemma3")
    }
    assert decoder_config(settings["mixtral"]).ropes[0].base == 1e6
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    for rope in ({}, {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}):
        assert [r.base for r in decoder_config(settings["gemma3"] | kinds | rope).ropes] == [1e4, 1e6]


def test_a_second_configuration_of_clip_replaces_the_first(tmp_path):
    """Files of the first versions have the sizes in ``text_config_dict``."""
    record = read_record("clip")
    config = dict(record["config"])
    config["text_config_dict"], config["text_config"] = config["text_config"], {"hidden_size": 512}
    model = ml.from_pretrained(write_folder(tmp_path / "m", config, record["shapes"]))
    assert model.config.text.hidden == record["config"]["text_config"]["hidden_size"]


def test_every_record_is_of_a_family_whose_settings_are_listed():
    assert {read_record(f)["config"]["model_type"] for f in DECODERS} <= set(KNOWN)
    assert not [name for name, (read, fixed) in KNOWN.items() if {*read.split()} & {*fixed}]


@pytest.mark.parametrize("family", ["vit", "clip"])
def test_images_that_are_not_square_are_refused(family, tmp_path):
    record = read_record(family)
    config = json.loads(json.dumps(record["config"]))
    (config["vision_config"] if family == "clip" else config)["image_size"] = [16, 24]
    with pytest.raises(ml.InputError, match="'image_size' is \\[16, 24\\], expected a positive integer"):
        ml.from_pretrained(write_folder(tmp_path / "m", config, record["shapes"]))


@pytest.mark.parametrize(
    ("family", "windows"),
    [("qwen2_windows", (None, 4)), ("qwen2_moe_windows", (4, None)), ("qwen3_moe_windows", (4, 4))],
)
def test_windows_of_files_without_layer_types(family, windows):
    settings = {k: v for k, v in read_record(family)["config"].items() if k != "layer_types"}
    assert decoder_config(settings).windows == windows
    assert decoder_config(settings | {"use_sliding_window": False}).windows == (None, None)
