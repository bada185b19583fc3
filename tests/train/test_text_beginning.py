"""A run begins its texts as its stores began documents, from preparation to prompts and evaluations."""

import json

import pytest

from ringformer.cli import main
from ringformer.data import load_tokenizer
from ringformer.inference.text.run_text import RunText
from tests.data.chat_samples import sentencepiece

CONFIG = """
from ringformer.runs.config import base_config


def get_config():
    config = base_config("tiny")
    config.model.vocab_size, config.seq_len, config.batch_size, config.steps = 330, 64, 8, 1
    config.mesh_dim, config.data.held_out = "1,8,1,1", 0.0
    return config
"""


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["tokenizer", "false"])
def test_prompts_and_evaluations_begin_as_the_store(tmp_path, begin, capfd):
    model = sentencepiece(tmp_path)
    tokenizer = load_tokenizer(str(model))
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"The ring carries {i}. " * 20}) + "\n" for i in range(9))
    )
    (tmp_path / "config.py").write_text(CONFIG)
    store, run = tmp_path / "store", tmp_path / "run"
    source = [f"--source=jsonl:{tmp_path}/a.jsonl", f"--tokenizer={model}", "--held_out=0"]
    assert main(["data", "prepare", f"--store={store}", f"--begin={begin}", *source]) == 0
    words = [f"--config.data.store={store}", f"--config.data.tokenizer={model}", f"--config.run_dir={run}"]
    assert main(["train", f"--config={tmp_path}/config.py", *words]) == 0
    begins = begin == "tokenizer"
    saved = json.loads((run / "config.json").read_text())
    assert saved["texts_begin"] is begins and saved["data"]["begin"] == ("true" if begins else "false")
    assert RunText(run).encode("ring") == [*([tokenizer.bos_id] if begins else []), *tokenizer.encode("ring")]
    generate = ["generate", f"--run={run}", "--prompt=The ring", "--max_new_tokens=2"]
    assert main(generate) == 0
    assert "does not record" not in capfd.readouterr().err
    evaluate = ["eval", "perplexity", f"--run={run}", f"--store={store}", "--lengths=32"]
    assert main(evaluate) == 0
    head, *_ = (run / "evals" / "perplexity" / "cases.jsonl").read_text().splitlines()
    assert json.loads(head)["settings"]["begin"] == ([tokenizer.bos_id] if begins else [])
    del saved["texts_begin"], saved["ringformer_checksum"]
    (run / "config.json").write_text(json.dumps(saved))
    assert main(generate) == 0
    assert capfd.readouterr().err.count("does not record how its texts begin") == 1
    assert RunText(run).encode("ring") == tokenizer.encode("ring")
