"""docs/not-here.md: what the page calls absent is absent, and each way round is one."""

import ast
import dataclasses
import inspect
import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

import ringformer.models.own_attention
from ringformer import ring_attention
from ringformer.cli.verbs import VERBS
from ringformer.convert.hf_config import from_hf_config
from ringformer.data.sources.source_files import KINDS
from ringformer.hardware import CHIPS
from ringformer.inference.sampling import Sampling
from ringformer.models.interface import Features
from ringformer.models.registry import FAMILIES
from ringformer.parallel.device_order import check_slices
from ringformer.parallel.mesh import AXIS_NAMES
from ringformer.processes.stopping import LOST
from ringformer.runs.config import Config, DataConfig, LoraConfig, OptimizerConfig, base_config
from ringformer.runs.config_file import load_config, parse_stages
from tests.test_documentation import check_verb

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "not-here.md").read_text()
ROWS = {
    row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in PAGE.split("|---|---|---|\n")[1].splitlines())
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


IDENTIFIERS = ("id", "attr", "arg", "name", "asname")
"""Attributes of a syntax tree's nodes that are names."""
ONE_WORD = re.compile(r"[\w./:=+-]{1,40}")


def names_in_code(source: str) -> set[str]:
    """The names of a program, and its strings of one word: choices of options and keys of tables are such strings."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        names |= {getattr(node, key) for key in IDENTIFIERS if isinstance(getattr(node, key, None), str)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ONE_WORD.fullmatch(node.value):
            names.add(node.value)
    return names


NAMES_WHAT_IS_ABSENT = "ringformer/convert/mechanisms.py"
"""File that recognises, to refuse them, models with mechanisms that no family has."""


@cache
def words_of_the_package() -> frozenset[str]:
    """The names of all modules, of what is in them and of all verbs, whole and in parts, in small letters."""
    names = {word for verb in VERBS for word in verb.split()}
    for path in (ROOT / "ringformer").rglob("*.py"):
        if path == ROOT / NAMES_WHAT_IS_ABSENT:
            continue
        names |= {path.stem, *names_in_code(path.read_text())}
    parts = {part for name in names for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}
    return frozenset(name.lower() for name in {*names, *parts})


def fields(*kinds):
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


def refused(**config):
    """The error of a config.json that has these keys."""
    with pytest.raises(ValueError) as error:
        from_hf_config(LLAMA | config)
    return str(error.value)


def refused_run(**values):
    """The error of a config that has these values."""
    config = base_config("tiny")
    config.data.store = "runs/data"
    for key, value in values.items():
        config[key] = value
    with pytest.raises(ValueError) as error:
        parse_stages(config, inherit=False)
    return str(error.value)


def no_architecture(*names):
    """A check that config.json of these architectures are refused by name."""

    def check():
        for name in names:
            assert name in refused(architectures=[name])

    return check


def no_quantised_base(method):
    """A check that checkpoints of a method are refused, and that adapters have bases of two dtypes."""

    def check():
        assert "quantization_config" in refused(quantization_config={"quant_method": method})
        assert set(get_args(LoraConfig.__annotations__["base_dtype"])) == {"float32", "bfloat16"}

    return check


def no_field(*names):
    """A check that no config and no family has a key of these names."""

    def check():
        models = {family.config for family in FAMILIES.values()}
        assert not set(names) & fields(Config, DataConfig, OptimizerConfig, LoraConfig, *models)

    return check


def no_argument(*names):
    """A check that the op has no argument of these names, and has those that the page offers instead."""

    def check():
        options = set(inspect.signature(ring_attention).parameters)
        assert {"segment_ids", "window", "attend_first", "sinks", "logit_softcap", "bias"} <= options
        assert not set(names) & options

    return check


def no_compute_dtype(*names):
    """A check that models do not compute in these dtypes."""

    def check():
        for name in names:
            config = base_config("tiny")
            config.data.store, config.model.compute_dtype = "runs/data", name
            with pytest.raises(ValueError, match="compute_dtype"):
                parse_stages(config, inherit=False)

    return check


def four_axes():
    assert AXIS_NAMES == ("dp", "fsdp", "tp", "sp")


def own_arrays():
    assert {"fields", "read"} <= set(Features._fields)


def own_attention():
    assert callable(ringformer.models.own_attention.register_attention)


def three_optimizers():
    assert get_args(OptimizerConfig.__annotations__["name"]) == ("adamw", "lion", "adafactor")


def muon_is_refused():
    with pytest.raises(ValueError, match=r"optimizer.name=muon orthogonalises whole matrices.*choose adamw"):
        OptimizerConfig(name="muon")


def two_schedules():
    assert get_args(OptimizerConfig.__annotations__["schedule"]) == ("cosine", "constant")


def no_bucket(scheme):
    """A check that a bucket is neither a run's folder nor a store."""

    def check():
        place = f"{scheme}mine/run"
        assert f"run_dir={place!r} is not a folder of this machine" in refused_run(run_dir=place)
        error = refused_run(data={**base_config("tiny").data, "store": place})
        assert f"store={place!r} is not a folder of this machine" in error
        assert "--bucket=" in (ROOT / "scripts" / "tpu_pod.sh").read_text()

    return check


def stores_alone():
    assert "hf://NAME" in KINDS


def sampling_alone():
    assert fields(Sampling) == {"temperature", "top_k", "top_p", "seed"}


def one_format():
    assert {verb for verb in VERBS if verb.startswith("convert")} == {
        "convert from-hf",
        "convert to-hf",
        "convert to-peft",
        "convert verify",
    }


def restarted():
    assert LOST == 76 and "exit code 76" in PAGE
    assert "76" in (ROOT / "scripts" / "launch_options.sh").read_text()


def slices_are_copies():
    """A mesh whose dp the slices do not divide is refused, so no other axis leaves a slice."""
    with pytest.raises(ValueError, match="dp=1 is not a multiple of the 2 slices"):
        check_slices(1, 2)


def host_memory():
    source = (ROOT / "ringformer" / "models" / "offloaded_scan.py").read_text()
    assert "memory.Space.Host" in source and "open(" not in source and "model.offload" in PAGE


def no_chip(pattern):
    """A check that no chip's name has a pattern."""

    def check():
        assert not re.search(pattern, " ".join(CHIPS).lower())

    return check


def linux_alone():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert [name for name in classifiers if name.startswith("Operating System")] == [
        "Operating System :: POSIX :: Linux"
    ]
    assert "macOS and Windows are not tested" in (ROOT / "docs" / "support.md").read_text().replace("\n", " ")


def python_configs():
    with pytest.raises((ValueError, SyntaxError, FileNotFoundError)):
        load_config(ROOT / "mkdocs.yml", [])


def nothing_more():
    """For nouns that would show in the code's words alone."""


class Absent(NamedTuple):
    """Check by which a test notices that the thing exists."""

    words: tuple[str, ...]
    """Names, or parts of names, of which an implementation would have one."""
    check: Callable[[], None] = nothing_more
    """Raises AssertionError if a config, a verb or a file shows the thing."""


NOUNS = {
    "QLoRA": Absent(("qlora", "nf4"), no_quantised_base("bitsandbytes")),
    "bases in 4 or 8 bits": Absent(("4bit", "8bit", "int4", "dequantise", "dequantize"), no_quantised_base("fp8")),
    "bitsandbytes": Absent(("bitsandbytes", "bnb"), no_quantised_base("bitsandbytes")),
    "GPTQ": Absent(("gptq",), no_quantised_base("gptq")),
    "AWQ": Absent(("awq",), no_quantised_base("awq")),
    "pipeline parallelism": Absent(("pp", "gpipe", "pipeline_parallel", "pipeline_stages"), four_axes),
    "mixture of experts": Absent(
        ("moe", "expert", "experts", "num_experts"),
        no_architecture("Qwen3MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM"),
    ),
    "expert parallelism": Absent(("ep", "expert_parallel"), four_axes),
    "DPO": Absent(("dpo",), no_field("beta", "loss")),
    "PPO": Absent(("ppo",), no_field("clip_range", "loss")),
    "GRPO": Absent(("grpo",), no_field("rollouts", "loss")),
    "reward models": Absent(("reward", "rewards", "preference"), no_field("reward", "preference")),
    "images": Absent(("images", "pixel", "pixel_values"), no_architecture("Qwen2_5_VLForConditionalGeneration")),
    "audio": Absent(("audio", "waveform"), own_arrays),
    "MLA": Absent(("mla", "kv_lora_rank"), own_attention),
    "linear attention": Absent(("linear_attention", "delta_rule", "deltanet"), own_attention),
    "state-space layers": Absent(("ssm", "state_space"), own_attention),
    "DeepSeek": Absent(("deepseek",), no_architecture("DeepseekV3ForCausalLM")),
    "Qwen3-Next": Absent(("qwen3next", "qwen3_next"), no_architecture("Qwen3NextForCausalLM")),
    "Mamba": Absent(("mamba", "mamba2"), no_architecture("MambaForCausalLM")),
    "attention masks": Absent(("attn_mask", "mask_mod"), no_argument("mask", "attention_mask")),
    "biases of any shape": Absent(("attention_bias_matrix", "score_mod"), no_argument("bias_matrix", "score_mod")),
    "ALiBi": Absent(("alibi",), no_argument("alibi", "slopes")),
    "dropout": Absent(("attention_dropout_rate", "hidden_dropout"), no_field("dropout", "lora_dropout")),
    "FP8": Absent(("fp8", "float8"), no_compute_dtype("float8_e4m3fn", "float8_e5m2")),
    "int8 training": Absent(("int8_training", "int8_matmul"), no_compute_dtype("int8")),
    "Muon": Absent(("newton_schulz", "orthogonalised", "scale_by_muon"), muon_is_refused),
    "optimizers besides AdamW, Lion and Adafactor": Absent(("sgd", "lamb", "shampoo"), three_optimizers),
    "schedules besides cosine and constant": Absent(("wsd", "polynomial", "polynomial_schedule"), two_schedules),
    "`gs://`": Absent(("gcsfs",), no_bucket("gs://")),
    "`s3://`": Absent(("s3fs", "boto3"), no_bucket("s3://")),
    "streaming datasets": Absent(("streaming", "iterabledataset"), stores_alone),
    "a server": Absent(("serve", "serving", "fastapi", "uvicorn", "httpserver")),
    "continuous batching": Absent(("continuous_batching", "paged_cache", "inflight"), sampling_alone),
    "beam search": Absent(("beam", "beams", "num_beams"), sampling_alone),
    "speculative decoding": Absent(("speculative", "draft", "draft_model"), sampling_alone),
    "GGUF": Absent(("gguf",), one_format),
    "Megatron": Absent(("megatron",), one_format),
    "NeMo": Absent(("from_nemo", "to_nemo", "nemo_files"), one_format),
    "MaxText checkpoints": Absent(("maxtext",), one_format),
    "adding or losing hosts while a run goes on": Absent(("elastic", "rescale"), restarted),
    "a ring over several TPU slices": Absent(("dcn", "outer_ring"), slices_are_copies),
    "offload to NVMe": Absent(("nvme", "swap_files"), host_memory),
    "AMD": Absent(("rocm", "amd", "hip"), no_chip(r"\bmi\d{3}")),
    "Intel GPUs": Absent(("xpu", "oneapi", "intel"), no_chip("gaudi|max ")),
    "Trainium": Absent(("trainium", "neuron"), no_chip("trn|trainium")),
    "Windows": Absent(("win32", "msvcrt"), linux_alone),
    "macOS": Absent(("darwin", "macos"), linux_alone),
    "a graphical interface": Absent(("gui", "tkinter", "gradio", "streamlit")),
    "YAML configs": Absent(("yaml", "yml"), python_configs),
    "sweeps": Absent(("sweep", "sweeps", "optuna")),
}
"""Every thing that the first column names."""

BETWEEN_NOUNS = {"and", "or", "as", "`run_dir`", "store"}
"""Words of the first column that name nothing that is absent."""


def unnamed_words(row: str) -> set[str]:
    """The words of a row's first cell that belong to no noun of `NOUNS`."""
    for noun in sorted(NOUNS, key=len, reverse=True):
        row = row.replace(noun, "")
    return set(re.findall(r"[^\s,()]+", row)) - BETWEEN_NOUNS


@pytest.mark.parametrize("row", ROWS)
def test_every_noun_of_a_row_has_its_check(row):
    words = unnamed_words(row)
    assert not words, "add what these words name to NOUNS, with the way in which a test would notice that it exists"


def test_a_noun_without_a_check_is_found():
    assert unnamed_words("a server, beam search, a quantised cache") == {"a", "quantised", "cache"}


def present_words(noun: str) -> set[str]:
    """The words of a noun that the package has."""
    return set(NOUNS[noun].words) & words_of_the_package()


@pytest.mark.parametrize("noun", NOUNS)
def test_what_the_page_calls_absent_is_absent(noun):
    assert noun in PAGE, "the page does not name it: delete it from NOUNS"
    assert not present_words(noun), f"ringformer has these names: if it has {noun}, take it off docs/not-here.md"
    NOUNS[noun].check()


@pytest.mark.parametrize("noun", NOUNS)
def test_a_thing_that_exists_is_noticed(noun, monkeypatch):
    """Each word of a noun, as the name of a function in the package."""
    for word in NOUNS[noun].words:
        source = f"def {word}(): pass" if word.isidentifier() else f"choice = '{word}'"
        words = frozenset(name.lower() for name in names_in_code(source))
        monkeypatch.setitem(globals(), "words_of_the_package", lambda words=words: words)
        assert present_words(noun) == {word}


def test_the_words_of_the_package_are_its_names():
    assert {"ring_attention", "zigzag", "int8", "cache_dtype", "longppl", "generator"} <= words_of_the_package()


def test_checks_can_fail():
    """Each with something that exists: a quantised cache was on this page although generation has one."""
    exists = (
        no_architecture("LlamaForCausalLM"),
        no_field("learning_rate"),
        no_argument("window"),
        no_compute_dtype("float32"),
        no_chip("h100"),
    )
    for check in exists:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check()


def test_every_row_has_a_reason_and_a_way_round():
    assert len(ROWS) > 15
    assert all(len(row) == 2 and all(len(cell) > 20 for cell in row) for row in ROWS.values())


def test_every_command_is_one():
    """A verb's options, and overrides of a config; other code on the page is a name."""
    code = [text for row in ROWS.values() for text in re.findall(r"`([^`]+)`", row[1])]
    verbs = [text.split()[1:] for text in code if text.startswith("ringformer ")]
    overrides = [text.split() for text in code if text.startswith("--config.") and "KEY" not in text]
    assert len(verbs) >= 8 and len(overrides) >= 6
    for words in verbs:
        check_verb(words)
    for words in overrides:
        extra = [] if any("init_from" in word for word in words) else ["--config.init_from=runs/base"]
        load_config(ROOT / "configs" / "quickstart.py", [*words, *extra])
