"""`ringformer eval perplexity | sliding | longppl` of a checkpoint, against the model of transformers."""

import json

import numpy as np
import pytest
import torch
import transformers

from ringformer.cli import main
from ringformer.data import load_tokenizer
from ringformer.data.sources.documents import Document
from ringformer.data.stores.prepare import build_stores
from ringformer.data.stores.token_store import TokenStore
from ringformer.evals.evaluation_setup import Opened
from tests.convert.models import save_model
from tests.inference.runs import model_folder

CONTEXT = 128
TEXTS = [
    "".join(f"Keys of rank {(i * j) % 7} travel é{chr(97 + (i * j * j) % 26)} " for j in range(3 + 2 * i))
    for i in range(3)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`hf`: a checkpoint with a BOS token; `ours`: its conversion; `other`: an evaluator; `store`: documents."""
    folder = tmp_path_factory.mktemp("perplexity")
    model_folder(folder / "ours", CONTEXT)
    tokenizer = load_tokenizer(str(folder / "hf"))
    build_stores(folder / "store", [Document(text, str(i)) for i, text in enumerate(TEXTS)], tokenizer, held_out=0)
    config = transformers.AutoConfig.from_pretrained(folder / "hf")
    transformers.set_seed(8)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "other")
    for path in (folder / "hf").glob("*token*"):
        (folder / "other" / path.name).write_bytes(path.read_bytes())
    return folder


def evaluate(folder, verb, *words, run="ours"):
    options = [f"--store={folder / 'store'}", f"--run={folder / run}", "--compute_dtype=float32", "--allow_longer"]
    return main(["eval", verb, *options, *words])


def rows_of(out):
    return [json.loads(line) for line in (out / "cases.jsonl").read_text().splitlines()[1:]]


def numbers(out):
    """Lines of the table, by their first number."""
    lines = [line.split() for line in out.splitlines()]
    return {line[0]: line for line in reversed(lines) if line and line[0].replace(",", "").isdigit()}


def documents_of(folder):
    """Documents without the BOS token that the store has before each."""
    store = TokenStore(folder / "store" / "train")
    assert store.begun == len(TEXTS)
    ends = store.offsets
    return {i: np.asarray(store.tokens[ends[i] + 1 : ends[i + 1]]).astype(int).tolist() for i in range(len(ends) - 1)}


def losses_of(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").double().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("mesh_dim", [pytest.param("1,1,1,1", marks=pytest.mark.slow), "2,1,1,2"])
def test_sliding_windows_are_those_of_the_loop_of_transformers(folder, tmp_path, mesh_dim, capsys):
    """The loop of Hugging Face's page on perplexity, with the BOS token that YaRN's evaluation adds to each window."""
    words = ["--lengths=16,32", "--stride=5", f"--out={tmp_path}", f"--mesh_dim={mesh_dim}", "--batch_size=3"]
    assert evaluate(folder, "sliding", *words) == 0
    model, out = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf"), numbers(capsys.readouterr().out)
    bos = model.config.bos_token_id
    for max_length in (16, 32):
        nats = tokens = text_bytes = 0
        for i, ids in documents_of(folder).items():
            if len(ids) < 32:
                continue
            prev_end_loc = 0
            for begin_loc in range(0, len(ids), 5):
                end_loc = min(begin_loc + max_length - 1, len(ids))
                trg_len = end_loc - prev_end_loc
                input_ids = torch.tensor([[bos, *ids[begin_loc:end_loc]]])
                target_ids = input_ids.clone()
                target_ids[:, :-trg_len] = -100
                with torch.no_grad():
                    nats += float(model(input_ids, labels=target_ids).loss) * trg_len
                tokens += trg_len
                prev_end_loc = end_loc
                if end_loc == len(ids):
                    break
            text_bytes += len(TEXTS[i].encode())
        line = out[str(max_length)]
        assert line[2] == f"{tokens:,}" and float(line[4]) == pytest.approx(nats / tokens, abs=1e-4)
        assert float(line[5]) == pytest.approx(nats / np.log(2) / text_bytes, abs=2e-4)
    assert (tmp_path / "sliding.png").is_file()


def test_a_killed_evaluation_goes_on_in_a_document(folder, tmp_path, capsys):
    words = ["--lengths=32", "--stride=9", f"--out={tmp_path}"]
    assert evaluate(folder, "sliding", *words) == 0
    out, lines = capsys.readouterr().out, (tmp_path / "cases.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cases.jsonl").write_text("".join(lines[:5]))
    assert evaluate(folder, "sliding", *words) == 0
    again = capsys.readouterr()
    assert again.out == out and sorted((tmp_path / "cases.jsonl").read_text().splitlines(keepends=True)) == sorted(
        lines
    )
    read = [int(line.split()[-2]) for line in again.err.splitlines() if line.endswith(" read")]
    assert sum(read) == len(lines) - 5


@pytest.mark.usual("other")
@pytest.mark.parametrize("evaluator", [None, "other"])
def test_longppl_is_that_of_its_definition(folder, tmp_path, evaluator, capsys):
    """Token by token, with the models of transformers."""
    rule = ["--short=20", "--stride=6", "--alpha=0.1", "--beta=-5.5"]
    words = [*([f"--evaluator={folder / evaluator}"] if evaluator else []), *rule]
    assert evaluate(folder, "longppl", "--lengths=64", f"--out={tmp_path}", *words) == 0
    out = capsys.readouterr().out
    assert f"key tokens by {'other, step 0' if evaluator else 'the evaluated model'}" in out
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    judge = transformers.AutoModelForCausalLM.from_pretrained(folder / evaluator) if evaluator else model
    key_losses, all_losses = [], []
    for ids in documents_of(folder).values():
        if len(ids) >= 64:
            text = [model.config.bos_token_id, *ids[:63]]
            losses, with_long = losses_of(model, text), losses_of(judge, text)
            all_losses += losses.tolist()
            for i in range(20, 64):
                begin = (i - 20) // 6 * 6
                with_short = losses_of(judge, text[begin : i + 1])[-1]
                if with_short - with_long[i - 1] > 0.1 and with_long[i - 1] < 5.5:
                    key_losses.append(losses[i - 1])
    key, whole = (line.split() for line in out.splitlines() if line.split()[:1] == ["64"])
    assert len(key_losses) > 10 and key[2:4] == [str(len(key_losses)), f"{len(key_losses) / len(all_losses):.2%}"]
    assert float(key[4]) == pytest.approx(np.mean(key_losses), abs=1e-4)
    assert float(whole[4]) == pytest.approx(np.mean(all_losses), abs=1e-4) and whole[2] == str(len(all_losses))


def test_another_evaluator_is_another_evaluation(folder, tmp_path, capsys):
    words = ["--lengths=64", "--short=20", f"--out={tmp_path}"]
    assert evaluate(folder, "longppl", *words) == 0
    assert evaluate(folder, "longppl", *words, f"--evaluator={folder / 'other'}") == 2
    assert "holds cases with other settings: evaluator is {" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        ("sliding", ["--lengths=16", "--stride=16"], "--stride=16 must be 1 to 15, the tokens of a document"),
        (
            "sliding",
            ["--lengths=16,32", "--stride=5", "--tokens=20"],
            "--tokens=20 is less than the longest of --lengths, 32",
        ),
        ("sliding", ["--lengths=4K", "--stride=5"], "has no document of 4,096 tokens, the longest has"),
        ("sliding", ["--lengths=16", "--documents=0"], "--documents=0 must be at least 1"),
        ("longppl", ["--lengths=64"], "a context of 64 tokens has no token after a short context of 4,096"),
        ("longppl", ["--lengths=64", "--short=9", "--evaluator=none"], "there is no folder none"),
        ("perplexity", ["--lengths=64", "--last=64"], "--last=64 tokens must be at least 1, and fewer than the 64"),
    ],
)
def test_what_cannot_be_is_one_line(folder, tmp_path, monkeypatch, capsys, verb, words, message):
    monkeypatch.setattr(Opened, "load", lambda *_: pytest.fail("was loaded"))
    assert evaluate(folder, verb, *words, f"--out={tmp_path}") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_an_evaluator_of_another_tokenizer_is_refused(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Opened, "load", lambda *_: pytest.fail("was loaded"))
    save_model(tmp_path / "bytes", "llama_3", vocab_size=420, num_hidden_layers=1, max_position_embeddings=CONTEXT)
    (tmp_path / "bytes" / "tokenizer.json").write_text((folder / "hf" / "tokenizer.json").read_text().replace("Ġ", "Ģ"))
    words = ["--lengths=64", "--short=9", f"--evaluator={tmp_path / 'bytes'}", f"--out={tmp_path}/o"]
    assert evaluate(folder, "longppl", *words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "has tokenizer tokenizer.json-" in error and "name an evaluator with the same tokenizer" in error
