"""Every key of a config is classified: what defines a run, and what does not."""

import dataclasses

import pytest

from ringformer.models.registry import FAMILIES
from ringformer.parallel.lora import LoraConfig
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.runs.identity import HARMLESS, IN_STORE, RESOLVED, identity_hash, run_identity
from tests.models.toy import ToyConfig
from tests.train.runs import MODEL

DEFINES = {
    "seq_len",
    "batch_size",
    "seed",
    "data.packing",
    "data.packed_attention",
    "data.min_length",
    "data.max_length",
    "data.buckets",
    "data.mixture_by",
    "data.position_range",
    "optimizer.learning_rate",
    "optimizer.name",
    "optimizer.schedule",
    "optimizer.b1",
    "optimizer.b2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.clip_norm",
    "optimizer.params_dtype",
    "optimizer.reduce_dtype",
    "optimizer.skip_spikes",
}
"""Keys whose values are compared as they are."""

MODEL_DEFINES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "norm_eps",
    "window",
    "tie_embeddings",
    "init_std",
    "compute_dtype",
    "ulysses",
    "ring",
}
LAYERS = {"layer_types"}
"""Fields of families, all of which define a run."""
MODEL_HARMLESS = {
    "attention",
    "layout",
    "remat",
    "remat_group",
    "full_remat_layers",
    "offload",
    "fetch_ahead",
    "head_groups",
    "q_chunk",
    "k_chunk",
    "kernel",
    "kernel_check",
    "ffn_chunk",
    "loss_chunk",
}


def names(cls, part="") -> set[str]:
    return {part + field.name for field in dataclasses.fields(cls)}


def config(**changes) -> Config:
    return Config(**{"model": MODEL, "data": DataConfig(store="s"), "optimizer": OptimizerConfig()} | changes)


def test_every_key_is_in_one_class():
    """A new key must be put into one: does a run with another value of it have other numbers?"""
    keys = names(Config) - {"model", "data", "optimizer", "lora"} | names(DataConfig, "data.")
    keys |= names(OptimizerConfig, "optimizer.")
    classes = (DEFINES, RESOLVED, IN_STORE, HARMLESS)
    assert sum(map(len, classes)) == len(frozenset().union(*classes)), "a key is in two classes"
    assert frozenset().union(*classes) == keys


def test_moments_of_one_dtype_are_the_same_run_however_it_is_written():
    def moment_dtype(written: str) -> str:
        optimizer = OptimizerConfig(moment_dtype=written)
        return run_identity(config(optimizer=optimizer), "bytes")["optimizer.moment_dtype"]

    assert moment_dtype("bfloat16") == moment_dtype("bfloat16, bfloat16") == "bfloat16"
    assert moment_dtype("float32,float32") == OptimizerConfig().moment_dtype == "float32"
    assert moment_dtype("bfloat16, float32") == "bfloat16,float32"


def test_adapters_define_a_run():
    """All of their keys if there are some, else only that there are none."""

    def keys(**changes):
        return {key for key in run_identity(config(**changes), "bytes") if key.startswith("lora.")}

    assert keys() == {"lora.rank"} and keys(lora=LoraConfig(4), init_from="base") == names(LoraConfig, "lora.")


def test_every_key_of_a_model_is_in_one_class():
    own = {"qwen2": LAYERS, "qwen3": LAYERS, "smollm3": LAYERS, "ministral3": {"query_growth"}}
    own |= {"olmo3": LAYERS | {"local_theta"}, "gemma3": LAYERS | {"local_theta", "query_pre_attn_scalar"}}
    for name in (n for n, family in FAMILIES.items() if family.model.__module__.startswith("ringformer")):
        cls = FAMILIES[name].config
        assert names(cls) == MODEL_DEFINES | MODEL_HARMLESS | own.get(name, set()), "classify the new fields"
        assert set(cls.EXECUTION) == MODEL_HARMLESS
    found = {key.removeprefix("model.") for key in run_identity(config(), "bytes") if key.startswith("model.")}
    assert found == MODEL_DEFINES | {"attention"}  # a registered one defines a run (tests/models/test_own_attention.py)


def test_all_that_a_family_does_not_call_harmless_defines_a_run():
    model = ToyConfig()
    found = {key.removeprefix("model.") for key in run_identity(config(model=model), "bytes") if "model." in key}
    assert found == names(ToyConfig) and not hasattr(model, "EXECUTION")


def test_what_defines_a_run_is_in_its_identity(tmp_path):
    found = run_identity(config(init_from=str(tmp_path)), "bytes")
    assert found.keys() >= DEFINES | RESOLVED - {"data.store", "data.mixture"}
    assert not found.keys() & (HARMLESS | IN_STORE)
    assert found["init_from"] == {"at": str(tmp_path)}


@pytest.mark.parametrize(("schedule", "differ"), [("cosine", {"steps"}), ("constant", set())])
def test_steps_belong_to_a_schedule_that_ends_with_them(schedule, differ):
    shorter, longer = (
        run_identity(config(steps=steps, optimizer=OptimizerConfig(schedule=schedule, warmup_steps=5)), "bytes")
        for steps in (100, 200)
    )
    assert {key for key in shorter if shorter[key] != longer[key]} == differ
    assert (identity_hash(shorter) == identity_hash(longer)) == (not differ)


def test_a_hash_is_of_contents_and_not_of_places():
    identity = run_identity(config(), "bytes")
    here, there = (identity | {"init_from": {"at": at, "step": 1, "checkpoint": "c"}} for at in ("here", "there"))
    assert identity_hash(here) == identity_hash(there) != identity_hash(identity)
    assert identity_hash(identity | {"init_from": {"at": "here", "step": 2, "checkpoint": "c"}}) != identity_hash(here)
