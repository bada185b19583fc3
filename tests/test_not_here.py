"""docs/not-here.md: what the page calls absent is absent, and each way round is one."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import get_args

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
from ringformer.parallel.mesh import AXIS_NAMES
from ringformer.processes.peers import LOST
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


def fields(*kinds):
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


def refused(**config):
    """The error of a config.json that has these keys."""
    with pytest.raises(ValueError) as error:
        from_hf_config(LLAMA | config)
    return str(error.value)


def no_verb(*words):
    return not [verb for verb in VERBS if set(verb.replace("-", " ").split()) & set(words)]


def refused_run(**values):
    config = base_config("tiny")
    config.data.store = "runs/data"
    for key, value in values.items():
        config[key] = value
    with pytest.raises(ValueError) as error:
        parse_stages(config, inherit=False)
    return str(error.value)


def quantised():
    assert "quantization_config" in refused(quantization_config={"quant_method": "gptq"})
    assert set(get_args(LoraConfig.__annotations__["base_dtype"])) == {"float32", "bfloat16"}


def experts():
    for name in ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM"):
        assert name in refused(architectures=[name])
    assert len([family for family in FAMILIES.values() if family.hugging_face]) == 9 and "nine" in PAGE


def one_loss():
    assert no_verb("dpo", "grpo", "ppo", "reward")
    assert not {"loss", "reward", "preference", "beta"} & fields(Config, DataConfig, OptimizerConfig)


def text_alone():
    assert "Qwen2_5_VLForConditionalGeneration" in refused(architectures=["Qwen2_5_VLForConditionalGeneration"])
    assert {"fields", "read"} <= set(Features._fields)


def softmax_alone():
    for name in ("DeepseekV3ForCausalLM", "Qwen3NextForCausalLM", "MambaForCausalLM"):
        assert name in refused(architectures=[name])
    assert callable(ringformer.models.own_attention.register_attention)


def masks():
    options = set(inspect.signature(ring_attention).parameters)
    assert {"segment_ids", "window", "attend_first", "sinks", "logit_softcap", "bias"} <= options
    assert not {"mask", "attention_mask", "alibi", "dropout"} & options


def precision():
    config = base_config("tiny")
    config.data.store, config.model.compute_dtype = "runs/data", "float8_e4m3fn"
    with pytest.raises(ValueError, match="compute_dtype"):
        parse_stages(config, inherit=False)


def adamw_alone():
    assert get_args(OptimizerConfig.__annotations__["schedule"]) == ("cosine", "constant")
    assert "name" not in fields(OptimizerConfig) and {"b1", "b2"} <= fields(OptimizerConfig)


def no_bucket():
    for place in ("gs://mine/run", "s3://mine/run"):
        assert "is not a folder of this machine" in refused_run(run_dir=place)
    assert "--bucket=" in (ROOT / "scripts" / "tpu_pod.sh").read_text()


def stores_alone():
    assert "hf://NAME" in KINDS and not {"streaming"} & fields(DataConfig)


def no_server():
    assert no_verb("serve", "server") and fields(Sampling) == {"temperature", "top_k", "top_p", "seed"}


def formats():
    assert {verb for verb in VERBS if verb.startswith("convert")} == {
        "convert from-hf",
        "convert to-hf",
        "convert to-peft",
        "convert verify",
    }


def restarted():
    assert LOST == 76 and "exit code 76" in PAGE
    assert "76" in (ROOT / "scripts" / "launch_options.sh").read_text()


def one_slice():
    """Devices of two slices have the same coordinates, and the order of devices looks at nothing else."""
    source = "".join(path.read_text() for path in (ROOT / "ringformer").rglob("*.py"))
    assert "slice_index" not in source and "coords" in source


def host_memory():
    source = (ROOT / "ringformer" / "models" / "offloaded_scan.py").read_text()
    assert "memory.Space.Host" in source and "open(" not in source and "model.offload" in PAGE


def chips():
    assert not re.search("mi[0-9]{3}|gaudi|trainium", " ".join(CHIPS).lower())
    assert "AMD GPUs are not supported" in (ROOT / "docs" / "support.md").read_text().replace("\n", " ")


def platforms():
    assert "macOS and Windows are not tested" in (ROOT / "docs" / "support.md").read_text().replace("\n", " ")


def python_configs():
    assert no_verb("gui", "ui", "sweep")
    with pytest.raises((ValueError, SyntaxError, FileNotFoundError)):
        load_config(ROOT / "mkdocs.yml", [])


CHECKS = {
    "QLoRA": quantised,
    "pipeline": lambda: AXIS_NAMES == ("dp", "fsdp", "tp", "sp") or pytest.fail("there are other axes"),
    "mixture": experts,
    "DPO": one_loss,
    "images": text_alone,
    "MLA": softmax_alone,
    "attention": masks,
    "FP8": precision,
    "optimizers": adamw_alone,
    "`gs://`": no_bucket,
    "streaming": stores_alone,
    "a server": no_server,
    "GGUF": formats,
    "adding": restarted,
    "TPU slices": one_slice,
    "offload": host_memory,
    "AMD": chips,
    "Windows": platforms,
    "a graphical": python_configs,
}
"""By the first words of a row."""


def check_of(row):
    (check,) = [check for words, check in CHECKS.items() if row.startswith(words)]
    return check


@pytest.mark.parametrize("row", ROWS)
def test_what_the_page_calls_absent_is_absent(row):
    check_of(row)()


def test_every_row_has_a_reason_and_a_way_round():
    assert len(ROWS) == len(CHECKS) == 19
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
