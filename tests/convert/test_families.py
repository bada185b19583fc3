"""Every family comes from transformers and goes back: the same logits, the same tokens, the same bits."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from ringformer.cli import main
from ringformer.convert import from_hf, to_hf
from ringformer.convert.hf_config import from_hf_config, text_config, to_hf_config
from ringformer.convert.verify_logits import verify
from ringformer.inference.generator import Generator
from ringformer.models.registry import FAMILIES, preset_config
from tests.convert.families import FAMILIES as TINY
from tests.convert.families import SIZES, YARN, hf_config, save_tiny

PROMPT = [int(x) for x in np.random.default_rng(0).integers(0, 257, 48)]
"""More than two windows, and three original contexts."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """`converted(family)`: folders of the family's tiny checkpoint, as saved by transformers and as converted."""
    folders = {}

    def of(family):
        if family not in folders:
            folder = tmp_path_factory.mktemp(family)
            save_tiny(family, folder / "theirs")
            from_hf(folder / "theirs", folder / "ours")
            folders[family] = folder / "theirs", folder / "ours"
        return folders[family]

    return of


def test_every_family_has_a_checkpoint():
    assert TINY.keys() == {name for name, family in FAMILIES.items() if family.hugging_face}


@pytest.mark.usual("gemma3", "smollm3", "olmo3", "qwen2", "ministral3")
@pytest.mark.parametrize("family", TINY)
def test_logits_and_tensors(converted, tmp_path, family):
    """Over 96 tokens: five windows, six original contexts. Back, every tensor has the same bits."""
    theirs, ours = converted(family)
    comparison = verify(theirs, ours, length=96)
    assert comparison.agrees and comparison.rounded is None
    to_hf(ours, tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert verify(tmp_path / "back", ours, length=96).agrees


def continued(folder, tokens: int) -> list[int]:
    """Continue the prompt greedily with transformers."""
    from transformers import AutoModelForCausalLM

    model, text = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), list(PROMPT)
    with torch.no_grad():
        for _ in range(tokens):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(PROMPT) :]


QUICK = "qwen2", "ministral3", "olmo3", "gemma3"
"""Families whose layers have all parts between them; the others are slow tests."""


@pytest.mark.usual("1,1,2,4-None-gemma3", "1,1,2,4-None-olmo3")
@pytest.mark.parametrize("family", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in TINY])
@pytest.mark.parametrize(
    ("mesh_dim", "chunk"),
    [
        ("1,1,2,4", None),
        pytest.param("1,2,4,1", None, marks=pytest.mark.slow),
        pytest.param("1,1,2,4", 16, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens(converted, family, mesh_dim, chunk):
    """On a ring and with tp, with two key heads for two or four ranks; the prompt at once, and in three chunks."""
    theirs, ours = converted(family)
    sizes = {"max_length": 96, "prefill_chunk": chunk}
    generator = Generator.load(ours, mesh_dim=mesh_dim, compute_dtype="float32", **sizes)
    assert generator.generate([PROMPT], max_new_tokens=24) == [continued(theirs, 24)]


@pytest.mark.parametrize("name", [x for family in FAMILIES.values() if family.hugging_face for x in family.presets])
def test_configs_of_presets_come_back(name):
    """transformers reads them too, and finds the same number of parameters."""
    config = preset_config(name)
    described = to_hf_config(config, max_position=2**18, dtype="bfloat16", token_ids={})
    assert from_hf_config(json.loads(json.dumps(described))) == config


@pytest.mark.parametrize("family", TINY)
def test_a_stage_with_another_rope_goes_back(converted, family):
    """The fields that a context extension changes."""
    config = from_hf_config(json.loads((converted(family)[0] / "config.json").read_text()))
    longer = replace(config, rope_theta=3e5)
    described = to_hf_config(longer, max_position=512, dtype="float32", token_ids={})
    assert from_hf_config(described) == longer


def described(family: str, **changes) -> dict:
    named = {"architectures": [FAMILIES[family].hugging_face.architecture]}
    return hf_config(family).to_dict() | named | changes


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "has 3 layer_types and num_hidden_layers=4"),
        ("qwen2", {"use_sliding_window": False}, r"sliding_attention in its layer_types and sliding_window=None"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types of 'linear_attention': only full_attention"),
        ("gemma3", {"sliding_window": None}, "sliding_attention in its layer_types and sliding_window=None"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "has final_logit_softcapping=30.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "has use_bidirectional_attention=True"),
        ("olmo3", {"rope_parameters": {"chunked": {"rope_type": "default"}}}, "has rope_parameters for chunked"),
        ("olmo3", {"attention_bias": True}, "has attention_bias=True"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
            "scales the rope of sliding_attention",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window=0, must be at least 1"),
        ("seed_oss", {"attention_bias": False}, "has attention_bias=False"),
        ("seed_oss", {"attention_out_bias": True}, "has attention_out_bias=True"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 1]}, "must be a list of 1 .* for 4 layers"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0, must be positive"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn' without factor"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "without low_freq_factor, high_freq"),
        (
            "ministral3",
            {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 0}},
            "original_max_position",
        ),
        ("gemma3", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false', must be true or false"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\], must be a list"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0, must be a whole number of at least 1"),
        ("smollm3", {"use_sliding_window": True}, "has use_sliding_window=True"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "has no llama_4_scaling_beta"),
        ("ministral3", {"sliding_window": 8}, "has sliding_window=8"),
        ("qwen2", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "has rope type 'longrope'"),
        ("llama", {"architectures": ["Qwen3MoeForCausalLM"]}, "the model is a Qwen3MoeForCausalLM: ringformer has no"),
        ("llama", {"architectures": ["LlamaModel", "Other"]}, "the model is a LlamaModel, Other: ringformer has no"),
        ("qwen3", {"model_type": "qwen2"}, "has model_type='qwen2': only 'qwen3' can be converted as Qwen3ForCausalLM"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(family, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        from_hf_config(described(family, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_missing_and_extra_tensors(converted, tmp_path, family):
    from safetensors.torch import save_file

    theirs, _ = converted(family)
    tensors = load_file(theirs / "model.safetensors")
    name = "model.layers.1.self_attn.q_norm.weight"
    tensors["model.layers.0.self_attn.q_proj.bias"] = tensors.pop(name).clone()
    (tmp_path / "broken").mkdir()
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    (tmp_path / "broken" / "config.json").write_text((theirs / "config.json").read_text())
    with pytest.raises(ValueError, match=r"q_proj\.bias \[16\] is left over\n.*q_norm\.weight \[16\] is missing"):
        from_hf(tmp_path / "broken", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usual("gemma3-Gemma3")
@pytest.mark.parametrize(("family", "wrapper"), [("gemma3", "Gemma3"), ("ministral3", "Mistral3")])
def test_the_text_model_of_a_vision_model(converted, tmp_path, family, wrapper):
    """Under the names that checkpoints on the hub have; what belongs to images is left out."""
    from safetensors.torch import save_file

    theirs, _ = converted(family)
    tensors = {f"language_model.{name}": x for name, x in load_file(theirs / "model.safetensors").items()}
    tensors["vision_tower.patch_conv.weight"] = torch.ones(3, 3)
    tensors["multi_modal_projector.linear.weight"] = torch.ones(3, 3)
    text = json.loads((theirs / "config.json").read_text())
    outer = {
        "architectures": [f"{wrapper}ForConditionalGeneration"],
        "model_type": wrapper.lower(),
        "text_config": text,
    }
    (tmp_path / "wrapped").mkdir()
    save_file(tensors, tmp_path / "wrapped" / "model.safetensors")
    (tmp_path / "wrapped" / "config.json").write_text(json.dumps(outer))
    assert from_hf(tmp_path / "wrapped", tmp_path / "out") == from_hf_config(text)
    assert verify(theirs, tmp_path / "out", length=48).agrees
    to_hf(tmp_path / "out", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_the_verbs_bring_a_family(converted, tmp_path, capsys):
    theirs, _ = converted("qwen3")
    assert main(["convert", "from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    assert main(["convert", "verify", str(theirs), str(tmp_path / "ours")]) == 0
    assert "verdict: the same model" in capsys.readouterr().out
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["family"] == "qwen3"


def test_absent_keys_have_the_values_of_transformers():
    """Those that the files of released models leave out."""
    for name, (theirs, _) in TINY.items():
        cls = getattr(transformers, f"{theirs}TextConfig" if theirs == "Gemma3" else f"{theirs}Config")
        defaults = FAMILIES[name].hugging_face.defaults
        there = {key: getattr(cls(), key) for key in defaults if key != "sliding_window"}  # some clear an unused one
        there |= {"sliding_window": cls.sliding_window} if "sliding_window" in defaults else {}
        assert there == defaults
        for key, usual in (("rms_norm_eps", 1e-6), ("tie_word_embeddings", False), ("num_key_value_heads", None)):
            assert defaults.get(key, usual) == getattr(cls, key)
    released = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    released |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": released}
    assert from_hf_config(outer) == preset_config("gemma3_4b")


def test_the_vision_model_decides_ids_ties_and_quantization():
    text = described("gemma3") | {"tie_word_embeddings": True, "eos_token_id": 1}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    merged, _ = text_config(outer | {"tie_word_embeddings": False, "eos_token_id": [1, 106]})
    assert merged["eos_token_id"] == [1, 106] and merged["tie_word_embeddings"] is False
    with pytest.raises(ValueError, match="has quantization_config="):
        from_hf_config(outer | {"quantization_config": {"quant_method": "fp8"}})


@pytest.mark.usual("gemma3")
@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_full_layers_alone_go_back(tmp_path, family):
    """transformers wants a window of these families even if no layer has one."""
    save_tiny(family, tmp_path / "theirs", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    from_hf(tmp_path / "theirs", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert verify(tmp_path / "back", tmp_path / "ours", length=48).agrees


def test_a_vision_model_is_verified_by_its_text_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}}))
    with pytest.raises(ValueError, match="is a vision model, of which only the text model was brought"):
        verify(tmp_path, tmp_path)


def test_what_transformers_cannot_say_is_not_exported():
    """A layer without positions in a family that has none, and a scale that is no whole number."""
    with pytest.raises(ValueError, match="layer_types='FN' has layers N, which transformers' model has not"):
        to_hf_config(preset_config("qwen3_0.6b", layer_types="FN"), max_position=64, dtype="float32", token_ids={})
    with pytest.raises(ValueError, match=r"query_pre_attn_scalar=168\.5 is not whole"):
        odd = preset_config("gemma3_1b", query_pre_attn_scalar=168.5)
        to_hf_config(odd, max_position=64, dtype="float32", token_ids={})


def test_a_config_that_names_no_model_is_refused():
    with pytest.raises(ValueError, match="neither architectures nor a model_type"):
        from_hf_config({key: x for key, x in SIZES.items() if "token" not in key})
