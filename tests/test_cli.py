"""The command line: what a person sees who makes a mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringformer.cli import UsageError, load_config, main
from ringformer.estimate import targets, workload
from ringformer.estimate.compile_step import CompilerFailure
from ringformer.ops.rope import RopeScaling
from ringformer.train.config_files import parse

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.py"


def test_overrides_reach_the_config():
    config = load_config([f"--config={QUICKSTART}", "--config.mesh_dim=1,2,2,2", "--config.model.q_chunk=64"])
    assert (config.mesh_dim, config.model.q_chunk, config.model.k_chunk) == ("1,2,2,2", 64, None)


def test_overrides_reach_the_rope_scaling():
    change = ["kind=yarn", "factor=8", "original_max_position=512", "truncate=false"]
    config = load_config([f"--config={QUICKSTART}", *(f"--config.model.rope_scaling.{c}" for c in change)])
    scaling = RopeScaling("yarn", 8.0, original_max_position=512, truncate=False)
    assert parse(config).model.rope_scaling == scaling
    assert hash(parse(config).model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.steps=3"], "which config"),
        (["--config=configs/none.py"], "there is no config file configs/none.py"),
        ([f"--config={QUICKSTART}", "--config.stepz=3"], 'Did you mean "steps"'),
        ([f"--config={QUICKSTART}", "--config.model.num_head=3"], 'Did you mean "num_heads"'),
        ([f"--config={QUICKSTART}", "--config.steps=many"], "many"),
        ([f"--config={QUICKSTART}", "steps=3"], "unexpected arguments: steps=3"),
    ],
)
def test_mistakes_are_told(arguments, message):
    with pytest.raises((UsageError, FileNotFoundError), match=message):
        load_config(arguments)


def test_a_mistake_is_one_line_and_exit_code_2(capsys):
    assert main(["train", f"--config={QUICKSTART}", "--config.optimizer.learning_rat=1"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and 'Did you mean "learning_rate"' in err
    assert main(["trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err


def test_help(capsys):
    assert main([]) == main(["train", "--help"]) == 0
    assert "ringformer train --config=" in capsys.readouterr().out


def test_a_tokenizer_trained_and_a_store_built_with_it(tmp_path, capsys):
    lines = [json.dumps({"body": f"the ring carries block {i} of keys and values\n" * 20}) for i in range(40)]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    source = [f"--source=jsonl:{tmp_path}/docs.jsonl", "--field=body"]
    assert main(["data", "tokenizer", *source, "--vocab_size=300", f"--out={tmp_path}/t.model"]) == 0
    arguments = ["data", "prepare", *source, f"--store={tmp_path}/store", f"--tokenizer={tmp_path}/t.model"]
    assert main([*arguments, "--held_out=0.2"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/store/train" in out and f"{tmp_path}/store/eval" in out
    assert main([*arguments, "--held_out=0.3"]) == 2
    assert "held_out is 0.2, not 0.3" in capsys.readouterr().err


def test_the_installed_command_knows_its_verbs():
    done = subprocess.run([sys.executable, "-m", "ringformer.cli", "help"], capture_output=True, text=True, check=True)
    assert "data tokenizer" in done.stdout


def test_who_reads_no_further_sees_no_traceback(tmp_path):
    """`ringformer ... | head`"""
    command = [sys.executable, "-m", "ringformer.cli", "tables", "--passes=0", f"--docs={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read() and process.wait() == 141


ESTIMATE = ["estimate", "--model=llama_7b", "--target=8xH100", "--seq_len=524288"]


def test_an_estimate_without_its_compiler_is_a_closed_form_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    targets._devices.cache_clear()
    assert main(ESTIMATE) == 0
    out, err = capsys.readouterr()
    assert "pip install 'jax[cuda13]'" in err
    assert "closed form, not compiled: should fit" in out and "kept layer inputs" in out
    assert main([*ESTIMATE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["closed_form"] and found["fits"] and found["peak_bytes"] < found["hbm_bytes"]
    assert found["exposed_permute_bytes"] is None and found["step_seconds_model"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model=llama_9b", "unknown model 'llama_9b'; known models: tiny"),
        ("--target=v5e-3", "unknown slice 'v5e-3'; known: v5e-4"),
        ("--mesh_dim=1,1,1,5", "needs 5 devices, there are 8"),
        ("--head_groups=5", "head_groups=5 does not divide num_kv_heads=32"),
        ("--config.steps=3", "with --config=FILE, overrides are possible"),
    ],
)
def test_estimates_that_cannot_be(change, message, capsys):
    assert main([*ESTIMATE, change]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_row_lists_the_rows(capsys):
    assert main(["tables", "--row=v5e-256/9b"]) == 2
    assert "v5e-256/7b" in capsys.readouterr().err
    assert main(["tables", "--only=ringg", "--passes=0"]) == 2
    assert "no cell has 'ringg' in its name" in capsys.readouterr().err
    assert main(["tables", "--out=.", "--passes=0"]) == 2
    assert "--out=. is a folder" in capsys.readouterr().err


def test_a_broken_compiler_is_not_called_too_large(monkeypatch, capsys):
    def breaks(*args, **kwargs):
        raise CompilerFailure("INTERNAL: something else")

    monkeypatch.setattr(workload, "compile_step_apart", breaks)
    assert main(ESTIMATE) == 1
    out, err = capsys.readouterr()
    assert not out and "the compiler broke down, which says nothing of whether it fits: INTERNAL" in err


def test_a_budget_of_no_tokens_is_refused(capsys):
    assert main([*ESTIMATE, "--tokens=-5"]) == 2
    assert "--tokens=-5 must be positive" in capsys.readouterr().err
