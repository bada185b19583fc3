"""Models of Hugging Face: config.json, safetensors; and converted ones."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from tests.bad_inputs.runner import Row
from tests.bad_inputs.toys import HF_CONFIG

HUGE = 10**400
CONVERT = "convert from-hf row/hf row/out"


def _config(name: str, changes: dict[str, Any], **more) -> Row:
    """A config.json of Hugging Face with changes."""
    content = json.dumps(HF_CONFIG | changes)
    return Row(f"config.json: {name}", CONVERT, copies={"hf": "hf"}, files={"hf/config.json": content}, **more)


def _each(key: str, values: list[Any], **more) -> list[Row]:
    """Rows of one key of a config.json, by its value."""
    return [_config(f"{key}={json.dumps(value)[:70]}", {key: value}, **more) for value in values]


def _weights(name: str, header: Any, data: bytes = bytes(8), length: int | None = None) -> Row:
    """A safetensors file with a header of JSON, or of bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(text) if length is None else length) + text + data
    return Row(f"safetensors: {name}", CONVERT, copies={"hf": "hf"}, files={"hf/model.safetensors": content})


def _one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def _model(name: str, changes: dict[str, Any]) -> Row:
    """A converted model whose config.json has changes."""

    def write(path: Path) -> None:
        values = json.loads(path.read_text())
        values.pop("ringformer_checksum", None)
        values["model"] |= changes
        path.write_text(json.dumps(values))
        path.with_name("manifest.json").unlink()

    return Row(
        f"converted model: {name}",
        "generate --run=row/model --prompt=ring --max_new_tokens=2",
        copies={"model": "model"},
        files={"model/config.json": write},
    )


def _adapters(name: str, config: Any) -> Row:
    return Row(
        f"adapters: {name}",
        f"{CONVERT} --adapters=row/a",
        copies={"hf": "hf"},
        files={"a/adapter_config.json": json.dumps(config), "a/adapter_model.safetensors": b""},
    )


SIZE = ["", -1, 0, 1.5, True, None, [], {}, HUGE]

ROWS = [
    *_each("num_attention_heads", [*SIZE, 3, 10**9]),
    *_each("num_key_value_heads", [-1, 0, "2", 3, HUGE, [2]]),
    *_each("hidden_size", [-16, 0, "16", HUGE, None, 10**12]),
    *_each("intermediate_size", [-1, 0, HUGE, {}]),
    *_each("num_hidden_layers", [-1, 0, "1", 10**9, HUGE]),
    *_each("vocab_size", [-1, 0, "420", HUGE, 10**12]),
    *_each("head_dim", [-1, 0, "8", 7, HUGE, 10**9]),
    *_each("rope_theta", [-1, 0, "1", True, HUGE, -HUGE, float("nan"), float("inf")]),
    *_each("rms_norm_eps", [-1, "1e-5", HUGE, float("nan"), [], None]),
    *_each("initializer_range", [-1, HUGE, float("nan"), "x"]),
    *_each("max_position_embeddings", [-1, 0, "x", HUGE, float("nan"), [], None, 1.5]),
    *_each("original_max_position_embeddings", [-1, 0, "x", HUGE]),
    *_each(
        "rope_scaling",
        [
            3,
            "x",
            [1],
            {"type": 3},
            {"rope_type": []},
            {"rope_type": "x" * 3000},
            {"rope_type": "linear"},
            {"rope_type": "linear", "factor": 0},
            {"rope_type": "linear", "factor": -1},
            {"rope_type": "linear", "factor": HUGE},
            {"rope_type": "linear", "factor": "2"},
            {"rope_type": "linear", "factor": float("nan")},
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 0},
            {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": HUGE},
            {"rope_type": "yarn", "factor": 2, "beta_fast": 0},
            {"rope_type": "yarn", "factor": 2, "beta_fast": HUGE},
            {"rope_type": "yarn", "factor": 2, "mscale": "x"},
            {"rope_type": "yarn", "factor": 2, "truncate": 3},
            {
                "rope_type": "llama3",
                "factor": 2,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            },
            {
                "rope_type": "llama3",
                "factor": 2,
                "low_freq_factor": 0,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            },
            {"rope_type": "default", "unknown": 3},
            {"rope_theta": HUGE},
        ],
    ),
    *_each("rope_parameters", [3, [1], {"rope_theta": "x"}, {"rope_type": "linear", "factor": 1e300}]),
    *_each("tie_word_embeddings", [3, "true", None]),
    *_each("architectures", ["LlamaForCausalLM", 3, [3], ["A", "B"], ["x" * 3000], {}]),
    *_each("model_type", [3, "x", None, []]),
    *_each("quantization_config", [3, {"quant_method": "gptq"}]),
    *_each("partial_rotary_factor", ["x", 0.5, HUGE]),
    *_each("hidden_act", ["gelu", 3, None]),
    *_each("attention_bias", [True, "x"]),
    *_each("eos_token_id", [-1, "x", 420, HUGE, [[]], {}, 1.5, True]),
    _config("bos_token_id", {"bos_token_id": HUGE}, harmless="nothing reads it: a tokenizer names its tokens"),
    _config("a Qwen3 without keys", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "layer_types": 3}),
    _config(
        "a Qwen3 with other layers",
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "layer_types": ["x"]},
    ),
    _config(
        "a Qwen3 with a huge window",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "use_sliding_window": True,
            "sliding_window": HUGE,
        },
    ),
    _config("a Gemma 3 without keys", {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}),
    _config(
        "a Gemma 3 with a pattern of 0",
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "sliding_window_pattern": 0,
            "sliding_window": 4,
        },
    ),
    _config(
        "a Gemma 3 with a text for rope",
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}},
    ),
    _config(
        "an OLMo 3 with nulls", {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "layer_types": [None]}
    ),
    _config(
        "a SmolLM3 with layers of texts",
        {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": ["x"]},
    ),
    _config(
        "a SmolLM3 with an interval of 0",
        {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 0},
    ),
    _config(
        "a vision model",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text"},
        },
    ),
    *[
        _weights(name, header, **more)
        for name, (header, more) in {
            "huge length": (_one(), {"length": 2**63}),
            "largest length": (_one(), {"length": 2**64 - 1}),
            "length beyond the file": (_one(), {"length": 99_999}),
            "no header": (b"", {}),
            "binary": (b"\xff\xfe\0", {}),
            "deep": (b"[" * 100_000, {}),
            "deep objects": (b'{"a":' * 100_000, {}),
            "list": ([], {}),
            "overlapping offsets": (_one() | {"b": _one()["a"]}, {}),
            "negative shape": (_one(shape=[-2]), {}),
            "huge shape": (_one(shape=[2**40, 2**40]), {}),
            "shape of 10**400": (_one(shape=[HUGE]), {}),
            "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, {}),
            "unknown dtype": (_one(dtype="Q9"), {}),
            "dtype is a number": (_one(dtype=3), {}),
            "offsets beyond the file": (_one(data_offsets=[0, 2**40]), {}),
            "offsets reversed": (_one(data_offsets=[8, 0]), {}),
            "one offset": (_one(data_offsets=[0]), {}),
            "trailing bytes": (_one(), {"data": bytes(99)}),
            "metadata is a number": (_one() | {"__metadata__": 3}, {}),
            "another model": (_one(), {}),
            "no tensors": ({}, {"data": b""}),
        }.items()
    ],
    Row("safetensors: empty", CONVERT, copies={"hf": "hf"}, files={"hf/model.safetensors": b""}),
    Row(
        "safetensors: a fifo",
        CONVERT,
        files={
            "hf/config.json": json.dumps(HF_CONFIG),
            "hf/model.safetensors": lambda path: os.mkfifo(path),
        },
    ),
    Row(
        "safetensors: a folder", CONVERT, files={"hf/config.json": json.dumps(HF_CONFIG), "hf/model.safetensors/x": ""}
    ),
    Row(
        "safetensors: a dangling link",
        CONVERT,
        files={
            "hf/config.json": json.dumps(HF_CONFIG),
            "hf/model.safetensors": lambda path: path.symlink_to("nothing"),
        },
    ),
    *[
        Row(
            f"safetensors: index {name}",
            CONVERT,
            copies={"hf": "hf"},
            files={"hf/model.safetensors.index.json": json.dumps(index)},
        )
        for name, index in {
            "without a map": {},
            "with a list": {"weight_map": []},
            "with numbers": {"weight_map": {"a": 3}},
            "of nothing": {"weight_map": {"a": "nothing.safetensors"}},
            "of a folder": {"weight_map": {"a": ".."}},
            "of a NUL": {"weight_map": {"a": "a\0b"}},
            "of a long name": {"weight_map": {"a": "x" * 5000}},
        }.items()
    ],
    *[
        _model(f"{key}={json.dumps(value)[:20]}", {key: value})
        for key, value in [
            ("num_heads", -1),
            ("num_heads", "2"),
            ("num_heads", HUGE),
            ("num_layers", 0),
            ("num_layers", 10**9),
            ("hidden_size", 10**9),
            ("vocab_size", None),
            ("rope_theta", float("nan")),
            ("rope_theta", HUGE),
            ("rope_scaling", 3),
            ("rope_scaling", {"kind": "x"}),
            ("rope_scaling", {"kind": []}),
            ("compute_dtype", []),
            ("compute_dtype", "int3"),
            ("norm_eps", "x"),
            ("nothing", 1),
            ("window", -1),
            ("q_chunk", 0),
            ("layer_types", 3),
            ("layer_types", "X"),
            ("tie_embeddings", "x"),
            ("attention", "x"),
            ("attention", 3),
            ("head_dim", 10**9),
            ("init_std", float("nan")),
        ]
    ],
    *[
        _adapters(name, config)
        for name, config in {
            "list": [],
            "nothing": {},
            "rank is negative": {"r": -1, "peft_type": "LORA"},
            "rank is huge": {"r": HUGE, "peft_type": "LORA", "lora_alpha": 1, "target_modules": ["q_proj"]},
            "alpha is huge": {"r": 1, "peft_type": "LORA", "lora_alpha": 10**400, "target_modules": ["q_proj"]},
            "modules are a number": {"r": 1, "peft_type": "LORA", "lora_alpha": 1, "target_modules": 3},
        }.items()
    ],
    *[
        Row(f"rope {name}", f"convert from-hf toys/hf row/out {options}")
        for name, options in {
            "theta nan": "--rope_theta=nan",
            "theta 0": "--rope_theta=0",
            "theta 1e400": "--rope_theta=1e400",
            "theta -1": "--rope_theta=-1",
            "theta and drop": "--rope_theta=3 --drop_rope",
            "factor alone": "--rope_scaling.factor=2",
            "factor nan": "--rope_scaling.kind=linear --rope_scaling.factor=nan",
            "factor 1e300": "--rope_scaling.kind=linear --rope_scaling.factor=1e300",
            "yarn factor 1e308": "--rope_scaling.kind=yarn --rope_scaling.factor=1e308",
            "kind": "--rope_scaling.kind=x",
            "original 0": "--rope_scaling.kind=yarn --rope_scaling.factor=2 --rope_scaling.original_max_position=0",
        }.items()
    ],
]
