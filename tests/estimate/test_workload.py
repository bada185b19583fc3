"""What a workload is in numbers and as a command line."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringformer.cli.dataclass_flags import add_flags
from ringformer.estimate.closed_forms.training import state_bytes
from ringformer.estimate.workloads.state_flags import StateFlags
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.trained_state import state_keys, with_state
from ringformer.estimate.workloads.training import MemorySettings, Workload, estimate_command
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.paper.cells import cells
from ringformer.runs.config import OptimizerConfig

RESULTS = Path(__file__).parents[2] / "results"
TINY = Workload(LlamaConfig(**preset("tiny")), find_target("v5e-16"), "2,2,1,-1", 4096, 8, accumulate=2, name="tiny")


def test_its_tokens_and_shards():
    """16 devices, 2 of dp: two copies of the state, each on 8."""
    assert TINY.mesh_shape == (2, 2, 1, 4) and TINY.state_shards == 8
    assert (TINY.step_tokens, TINY.local_tokens) == (8 * 4096, 8 * 4096 // 2 // 16)


def test_every_recorded_command_is_that_of_its_cell():
    """So that a number of the tables can be had again, and a search goes on with the same words."""
    attempts = json.loads((RESULTS / "max_context.json").read_text())["cells"]
    for cell in cells():
        for attempt in attempts[cell.name]:
            chunks = attempt.get("q_chunk"), attempt.get("k_chunk")  # of a kernel: those that were the best then
            settings = MemorySettings(attempt["head_groups"], attempt["remat_group"], *chunks)
            workload = cell.workload(attempt["seq_len"]).with_settings(settings)
            assert estimate_command(workload) == attempt["command"]


@pytest.mark.parametrize("change", [{"name": "small"}, {"model": replace(TINY.model, ffn_chunk=512)}])
def test_what_no_flags_say_has_no_command(change):
    with pytest.raises(ValueError, match="no flags of `ringformer estimate` turn"):
        estimate_command(replace(TINY, **change))


def test_chunks_layout_and_microbatches_are_said():
    model = replace(TINY.model, q_chunk=512, layout="striped", offload=True)
    command = estimate_command(replace(TINY, model=model))
    assert " --batch_size=8 --accumulate=2 " in command
    assert "accumulate" not in estimate_command(replace(TINY, accumulate=1))
    assert "--layout=striped" in command and "--q_chunk=512" in command and "k_chunk" not in command
    assert command.endswith(" --offload --json")


@pytest.mark.parametrize(
    ("flags", "state"),
    [
        (["--optimizer=lion", "--moment_dtype=bfloat16"], {"optimizer": {"name": "lion", "moment_dtype": "bfloat16"}}),
        (
            ["--params_dtype=bfloat16", "--reduce_dtype=bfloat16"],
            {"optimizer": {"params_dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
        ),
        (["--lora_rank=8", "--lora_base_dtype=bfloat16"], {"lora": {"rank": 8, "base_dtype": "bfloat16"}}),
    ],
)
def test_flags_of_the_state_are_those_of_its_command_and_keys(flags, state):
    parser = argparse.ArgumentParser()
    add_flags(parser, StateFlags)
    workload = with_state(TINY, parser.parse_args(flags))
    parts = {"optimizer": TINY.optimizer, "lora": TINY.lora}
    assert workload == replace(TINY, **{name: replace(parts[name], **values) for name, values in state.items()})
    assert set(flags) <= set(estimate_command(workload).split())
    keys = []
    for part, values in state.items():
        keys += [f"{part}.{name}={value}" for name, value in values.items()]
    assert state_keys(workload) == keys and state_keys(TINY) == []
    assert state_bytes(workload) < state_bytes(TINY)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lora_base_dtype=bfloat16"], "set lora.rank"),
        (["--lora_rank=8", "--params_dtype=bfloat16"], "optimizer.params_dtype=bfloat16 with lora.rank=8"),
        (["--optimizer=adafactor", "--moment_dtype=bfloat16"], "optimizer.name=adafactor has float32 means"),
    ],
)
def test_flags_of_the_state_that_contradict_each_other_are_refused(flags, said):
    parser = argparse.ArgumentParser()
    add_flags(parser, StateFlags)
    with pytest.raises(ValueError, match=said):
        with_state(TINY, parser.parse_args(flags))


def test_a_flag_mends_what_a_config_cannot_have():
    """All flags count together, not one after the other."""
    parser = argparse.ArgumentParser()
    add_flags(parser, StateFlags)
    args = parser.parse_args(["--optimizer=adafactor"], argparse.Namespace(optimizer_offload="none"))
    offloaded = replace(TINY, optimizer=OptimizerConfig(offload="state"))
    assert with_state(offloaded, args).optimizer == OptimizerConfig(name="adafactor")
