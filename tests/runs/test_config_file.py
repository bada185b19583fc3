"""Config files with the overrides of a command line."""

from pathlib import Path

import pytest

from ringformer.ops.tokenwise.rope import RopeScaling
from ringformer.runs.config_file import load_config, parse

QUICKSTART = Path(__file__).parent.parent.parent / "configs" / "quickstart.py"


def test_overrides_reach_the_config():
    config = load_config(QUICKSTART, ["--config.mesh_dim=1,2,2,2", "--config.model.q_chunk=64"])
    assert (config.mesh_dim, config.model.q_chunk, config.model.k_chunk) == ("1,2,2,2", 64, None)
    assert load_config(QUICKSTART, ["--config.steps", "7"]).steps == 7


def test_overrides_reach_the_rope_scaling():
    change = ["kind=yarn", "factor=8", "original_max_position=512", "truncate=false"]
    config = load_config(QUICKSTART, [f"--config.model.rope_scaling.{c}" for c in change])
    scaling = RopeScaling("yarn", 8.0, original_max_position=512, truncate=False)
    assert parse(config).model.rope_scaling == scaling
    assert hash(parse(config).model)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--config.stepz=3"], r"has no key 'stepz'\. Did you mean \"steps\""),
        (["--config.model.num_head=3"], 'Did you mean "num_heads"'),
        (["--config.steps=many"], "many"),
        (["steps=3"], "unexpected arguments: steps=3"),
    ],
)
def test_mistakes_are_told(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(QUICKSTART, overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(:", r"SyntaxError: .*config\.py"),
        ("import nope", r"ModuleNotFoundError: No module named 'nope' \(line 1\)"),
        ("x = 3", "AttributeError: .* has no attribute 'get_config'"),
        ("def get_config():\n    return {}['a']", r"KeyError: 'a' \(line 2\)"),
        ("def get_config():\n    return 3", "returns int; it must return a `base_config"),
    ],
)
def test_a_file_that_makes_no_config_is_told_in_a_line(text, message, tmp_path):
    (tmp_path / "config.py").write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        load_config(tmp_path / "config.py", [])
    assert "\n" not in str(raised.value)


def test_a_config_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_the_config.py").write_text("STEPS = 7")
    text = QUICKSTART.read_text().replace("    return config", "    config.steps = STEPS\n    return config")
    (tmp_path / "config.py").write_text(
        text.replace("from ringformer", "from beside_the_config import STEPS\nfrom ringformer", 1)
    )
    assert load_config(tmp_path / "config.py", []).steps == 7


def test_an_override_that_every_stage_overrules_is_refused():
    staged = QUICKSTART.with_name("tiny_extension.py")
    with pytest.raises(ValueError, match=r"--config.seq_len: every stage of .* sets seq_len itself"):
        load_config(staged, ["--config.seq_len=64"])
    assert load_config(staged, ["--config.seed=7"]).seed == 7


def test_a_file_that_is_not_there():
    with pytest.raises(FileNotFoundError, match=r"there is no config file configs/none\.py; there are: configs/"):
        load_config("configs/none.py", [])
