"""The page from a folder of documents to a served model: its commands run, its numbers are the estimates'."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
import transformers

from tests.cpu_flags import FLAGS, cpu_environment
from tests.data.chat_samples import CORPUS, llama3
from tests.files.hub_stub import served
from tests.test_documentation import ROOT, blocks_of

PAGE = ROOT / "docs" / "how-to" / "my-documents-to-512k.md"
SHORTER = 256
"""The contexts of the page over those of its test."""
CONFIGS = ("llama3_8b_512k_8xh100", "llama3_8b_512k_lora_8xh100")
SIZES = {
    "vocab_size": 420,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
TINY = """
import runpy

def get_config():
    config = runpy.run_path("SHIPPED")["get_config"]()
    config.model.update(SIZES)
    config.model.compute_dtype = "float32"
    config.eval_batches = config.optimizer.warmup_steps = 1
    small = {"steps": 2, "batch_size": 2, "accumulate": 2}
    config.update(small)
    config.seq_len //= SHORTER
    config.stages = tuple(stage | small | {"seq_len": stage["seq_len"] // SHORTER} for stage in config.stages)
    return config
""".replace("SIZES", repr(SIZES)).replace("SHORTER", str(SHORTER))


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A clone on a machine with eight devices, with a tiny Llama 3.1 on its hub and documents in a folder."""
    folder, hub = tmp_path_factory.mktemp("node"), tmp_path_factory.mktemp("hub") / "meta-llama" / "Llama-3.1-8B"
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / "configs").mkdir()
    for name in CONFIGS:
        (folder / "configs" / f"{name}.py").write_text(TINY.replace("SHIPPED", str(ROOT / "configs" / f"{name}.py")))
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        vocab_size=SIZES["vocab_size"],
        hidden_size=SIZES["hidden_size"],
        intermediate_size=SIZES["intermediate_size"],
        num_hidden_layers=SIZES["num_layers"],
        num_attention_heads=SIZES["num_heads"],
        num_key_value_heads=SIZES["num_kv_heads"],
        max_position_embeddings=512,
        rope_parameters=rope | {"original_max_position_embeddings": 32},
    )
    hub.mkdir(parents=True)
    transformers.LlamaForCausalLM(config).save_pretrained(hub)
    llama3(hub)
    (folder / "documents" / "deep").mkdir(parents=True)
    for i in range(120):
        text = "\n".join(f"{i + j}: {CORPUS[j % 2]}" for j in range(60 + i))
        (folder / "documents" / ("deep" if i % 2 else "") / f"{i}.txt").write_text(text)
    (folder / "bin").mkdir()
    (folder / "bin" / "ringformer").write_text(f'#!/bin/sh\nexec {sys.executable} -m ringformer.cli "$@"\n')
    (folder / "bin" / "ringformer").chmod(0o755)
    with served(hub.parent.parent) as endpoint:
        yield (
            folder,
            cpu_environment(
                PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                PATH=os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
                RINGFORMER_PYTHON=sys.executable,
                XLA_FLAGS=f"{FLAGS} --xla_force_host_platform_device_count=8",
                HF_ENDPOINT=endpoint,
                HF_HOME=str(folder / "cache"),
            ),
        )


def shorter(text: str) -> str:
    """The text with contexts that a tiny model has in a test."""
    return re.sub(r"\b(131072|262144|524288)\b", lambda match: str(int(match[0]) // SHORTER), text)


@pytest.mark.slow
def test_every_command_after_the_installation_runs(node):
    folder, environment = node
    blocks = [block for block in blocks_of(PAGE) if block.language in ("bash", "python")]
    lines = [
        line for block in blocks if block.language == "bash" for line in block.text.replace("\\\n", "").splitlines()
    ]
    assert lines[0].startswith("bash scripts/setup_venv.sh"), "the installation, which is not run here"
    printed = {}
    for line in lines[1:]:
        start = time.time()
        done = subprocess.run(
            ["bash", "-c", shorter(line)], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        print(f"{time.time() - start:.1f} s: {line}")
        printed[" ".join(line.split()[:3])] = done.stdout + done.stderr
    documents = re.findall(r": (\d+) documents,", printed["ringformer data prepare"])
    assert sum(map(int, documents[:2])) == 120
    stages = json.loads((folder / "runs" / "ours-512k" / "stages.json").read_text())
    assert len(stages) == 2
    assert (folder / "runs" / "ours-lora" / "checkpoints").is_dir()
    (program,) = [block.text for block in blocks if block.language == "python"]
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<|begin_of_text|>The main point of these documents is")


def test_numbers_are_those_of_the_estimates():
    """Compare the table with the compiled estimates in results/stages.json."""
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    table = {name: cells for name, *cells in rows}
    stages = json.loads((ROOT / "results" / "stages.json").read_text())["stages"]
    for column, config in enumerate(CONFIGS):
        of_config = [stage for name, stage in stages.items() if name.startswith(f"{config}/") or name == config]
        assert of_config and not any(stage["closed_form"] for stage in of_config)
        assert table["config"][column] == f"`{config}.py`"
        peak, memory = (max(stage[key] for stage in of_config) / 2**30 for key in ("peak_bytes", "hbm_bytes"))
        expected = {
            "GPU memory": f"{peak:.1f} of {memory:.1f} GiB",
            "tokens per second at 512K": f"{of_config[-1]['tokens_per_second_model']:,.0f}",
            "MFU (causal) at 512K": f"{of_config[-1]['mfu_causal_model']:.0%}",
            "tokens": f"{sum(stage['tokens'] for stage in of_config) / 1e6:.0f}M",
            "days": f"{sum(stage['days_model'] for stage in of_config):.2f}",
            "GPU-hours": f"{sum(stage['device_hours_model'] for stage in of_config):.0f}",
        }
        assert {name: table[name][column] for name in expected} == expected
