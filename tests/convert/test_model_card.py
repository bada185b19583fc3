"""Model cards of exports: their numbers are those of the files that a run left, and no text breaks them."""

import json
import re
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from markdown_it import MarkdownIt
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from ringformer.cli import main
from ringformer.convert import from_hf, to_hf
from ringformer.inference.generator import load_model
from ringformer.runs.config import base_config
from ringformer.runs.config_file import parse, parse_stages
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from ringformer.train.stages import prepare_stages, train_stages
from tests.convert.families import save_tiny
from tests.files.hub_stub import COMMIT, served

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

THEIR_CARD = """---
license: other
license_name: "tiny-licence"
license_link: LICENSE
tags: [theirs]
---
# Their model
"""
STAGES = (
    {"seq_len": 32, "batch_size": 16, "steps": 2, "optimizer.learning_rate": 3e-3},
    {"seq_len": 64, "batch_size": 8, "steps": 3, "model.rope_theta": 4e4, "data.packed_attention": "sequence"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base from the hub, two stages on it, adapters of the last stage at another rope, and their exports."""
    folder = tmp_path_factory.mktemp("card")
    theirs = folder / "hub" / "local" / "tiny"
    save_tiny("qwen3", theirs, use_sliding_window=False, num_hidden_layers=2, initializer_range=0.1)
    (theirs / "README.md").write_text(THEIR_CARD)
    (theirs / "LICENSE").write_text("You may.\n")
    with served(folder / "hub") as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", endpoint)
        address = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        from_hf("hf://local/tiny", folder / "base")
    rows = [{"text": f"{i} keys and values travel around the ring while queries stay" * 3} for i in range(200)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = base_config("tiny")
    values.update({"init_from": str(folder / "base"), "run_dir": str(folder / "run"), "mesh_dim": "1,8,1,1"})
    values.update({"eval_batches": 1, "seq_len": 64, "batch_size": 8, "steps": 3})
    values.data.update({"store": str(folder / "store"), "source": f"jsonl:{folder}/rows.jsonl", "held_out": 0.3})
    values.model.compute_dtype = "float32"
    values.stages = STAGES
    configs = parse_stages(values)
    train_stages(configs, prepare_stages(configs))
    values.update({"stages": (), "init_from": configs[-1].run_dir, "run_dir": str(folder / "adapted")})
    values.lora.update({"rank": 4, "alpha": 6.0, "targets": "q_proj,down_proj"})
    values.model.rope_theta, values.optimizer.learning_rate = 9e4, 2e-2
    train(prepare(parse(values)))
    stage = folder / "run" / "stage-2-64"
    evaluation = [
        f"--run={stage}",
        f"--store={folder}/store",
        "--lengths=32",
        "--documents=2",
        "--compute_dtype=float32",
    ]
    assert main(["eval", "perplexity", *evaluation]) == 0
    assert main(["eval", "report", str(stage)]) == 0
    for kind, run, out in (("hf", stage, "export"), ("peft", folder / "adapted", "peft"), ("hf", stage, "BASE")):
        assert main(["convert", f"to-{kind}", str(run), str(folder / out)]) == 0
    return folder


def read(path):
    return json.loads(path.read_text())


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Parsed:
    """A card as the hub and a parser of Markdown read it."""

    def __init__(self, folder):
        card = ModelCard.load(folder / "README.md")
        self.text, self.data = card.content, card.data.to_dict()
        assert self.data == yaml.safe_load(self.text.split("---")[1])
        tokens = MarkdownIt("commonmark").enable("table").parse(card.text)
        self.headings, self.facts, self.blocks, self.html = [], [], [], []
        self.tables: list[list[list[str]]] = []
        for before, token in pairwise(tokens):
            if token.type == "table_open":
                self.tables.append([])
            elif token.type == "tr_open":
                self.tables[-1].append([])
            elif before.type in ("th_open", "td_open"):
                self.tables[-1][-1].append(token.content)
            elif before.type == "heading_open":
                self.headings.append(token.content)
            elif before.type == "paragraph_open" and token.level > 1:
                self.facts.append(token.content)
            elif token.type in ("fence", "code_block"):
                self.blocks.append(token.content)
            self.html += [x.content for x in (token, *(token.children or ())) if x.type.startswith("html")]

    def fact(self, name):
        """The values after a fact's name, by their own names."""
        lines = [fact.removeprefix(f"{name}: ") for fact in self.facts if fact.startswith(f"{name}: ")]
        assert len(lines) == 1
        return dict(part.split(" ", 1) for part in re.split(r", (?=\w+ )", lines[0]))


def number(text):
    return float(text.replace(",", ""))


@pytest.mark.slow
def test_every_number_is_one_that_the_run_recorded(folder):
    card, run = Parsed(folder / "export"), folder / "run"
    hf, store = read(folder / "export" / "config.json"), read(folder / "store" / "train" / "store.json")
    size = sum(x.numel() for x in load_file(folder / "export" / "model.safetensors").values())
    assert card.fact("Weights") == {"parameters": f"{size:,}", "dtype": "`float32`"}
    assert card.fact("Base model") == {"name": "`local/tiny`", "commit": f"`{COMMIT}`"}
    assert json.loads(re.search(r"rope_parameters `(.*?)`", card.text)[1]) == hf["rope_parameters"]
    assert hf["rope_parameters"]["rope_theta"] == 4e4 and "max_position_embeddings 256" in card.text
    assert card.fact("Data") == {
        "store": f"`{folder}/store`",
        "source": f"`jsonl:{folder}/rows.jsonl`",
        "documents": str(store["documents"]),
        "tokens": f"{store['tokens']:,}",
        "fingerprint": f"`{store['fingerprint']}`",
    }
    assert card.fact("Tokenizer") == {"name": "`bytes`"}
    (header, *stages), (columns, *positions), (head, *reported) = card.tables
    for cells, recorded in zip(stages, read(run / "stages.json"), strict=True):
        row, config = dict(zip(header, cells, strict=True)), read(run / recorded["run_dir"] / "config.json")
        assert row["run"] == f"`{recorded['run_dir']}`"
        assert row["packed_attention"] == f"`{config['data']['packed_attention']}`"
        assert row["rope_scaling"] == '`{"kind": "none"}`'
        expected = {
            "steps": recorded["steps"],
            "tokens": recorded["tokens"],
            "seq_len": recorded["seq_len"],
            "batch_size": config["batch_size"],
            "learning_rate": config["optimizer"]["learning_rate"],
            "rope_theta": recorded["rope_theta"],
        }
        assert {name: number(row[name]) for name in expected} == expected
        for name in ("first", "last"):
            assert number(row[f"{name} held-out loss"]) == pytest.approx(recorded[f"eval_loss_{name}"], abs=1e-4)
    last = rows_of(run / "stage-2-64" / "metrics.jsonl")[-1]
    assert "Held-out loss by position at step 3," in card.text and last["step"] == 3
    assert columns == ["first", "last", "tokens", "loss"]
    for cells, measured in zip(positions, last["eval_by_position"], strict=True):
        assert [number(x) for x in cells] == pytest.approx([measured[name] for name in columns], abs=1e-4)
    lines = read(run / "stage-2-64" / "evals" / "report" / "report.json")["lines"]
    assert head[-4:] == ["value", "from", "to", "unit"] and len(reported) == len(lines) > 3
    for cells, line in zip(reported, lines, strict=True):
        assert [number(x) for x in cells[4:7]] == pytest.approx([line["value"], *line["interval"]], rel=1e-3)
    (evaluation,) = [block for block in card.blocks if "perplexity" in block]
    assert evaluation == (run / "stage-2-64" / "evals" / "perplexity" / "table.txt").read_text()


def test_metadata_and_licence_are_those_of_the_base(folder):
    licence = {"license": "other", "license_name": "tiny-licence", "license_link": "LICENSE"}
    whole, adapters = Parsed(folder / "export"), Parsed(folder / "peft")
    expected = {"tags": ["ringformer"], **licence}
    assert whole.data == expected | {"library_name": "transformers", "base_model": "local/tiny"}
    assert adapters.data == expected | {"library_name": "peft"}, "their base is not on the hub"
    for out in ("base", "run/stage-1-32", "export", "peft"):
        assert (folder / out / "base_model_card.md").read_text() == THEIR_CARD
        assert (folder / out / "LICENSE").read_text() == "You may.\n"


def names_of(folder, monkeypatch):
    """Execute the code of a card in its folder, and return its variables."""
    monkeypatch.chdir(folder)
    (code,) = [block for block in Parsed(folder).blocks if "import" in block]
    exec(code, names := {})
    return names


@pytest.mark.parametrize(("export", "run"), [("export", "run/stage-2-64"), ("peft", "adapted")])
def test_its_code_loads_the_model(folder, export, run, monkeypatch):
    """Adapters with the rope that they were trained with, which is not that of their base."""
    if not (folder / "peft" / "BASE").exists():
        shutil.copytree(folder / "BASE", folder / "peft" / "BASE")
    tokens = np.random.default_rng(0).integers(0, 257, (1, 60))
    with torch.no_grad():
        theirs = names_of(folder / export, monkeypatch)["model"].eval()(torch.from_numpy(tokens)).logits.numpy()
    ours = np.asarray(load_model(folder / run, attention="vanilla", compute_dtype="float32")(tokens.astype(np.int32)))
    assert np.abs(theirs - ours).max() <= 1e-5
    assert np.abs(ours).max() > 0.1


def test_adapters_and_all_runs_before_them(folder):
    card = Parsed(folder / "peft")
    count = sum(x.numel() for x in load_file(folder / "peft" / "adapter_model.safetensors").values())
    assert card.headings[0] == "Adapters of Qwen3ForCausalLM"
    assert card.fact("Weights") == {"parameters": f"{count:,}", "dtype": "`float32`"}
    assert "Adapters: rank 4, alpha 6, projections `q_proj, down_proj`" in card.facts
    assert f"BASE, below: made by `ringformer convert to-hf`, of `{folder}/run/stage-2-64`" in card.facts
    header, *runs = card.tables[0]
    thetas = [dict(zip(header, cells, strict=True))["rope_theta"] for cells in runs]
    assert [cells[0] for cells in runs] == ["`stage-1-32`", "`stage-2-64`", "`adapted`"]
    assert thetas == ["10000", "40000", "90000"]


def test_a_converted_model_has_no_training(folder, tmp_path):
    to_hf(folder / "base", tmp_path / "back")
    card = Parsed(tmp_path / "back")
    assert card.headings == ["Qwen3ForCausalLM", "Load in this folder"] and card.tables == []
    assert card.data["base_model"] == "local/tiny"
    bare = shutil.copytree(folder / "base", tmp_path / "brought neither")
    for name in ("base_model_card.md", "LICENSE", "manifest.json"):
        (bare / name).unlink()
    to_hf(bare, tmp_path / "bare")
    assert "license" not in Parsed(tmp_path / "bare").data
    assert not (tmp_path / "bare" / "base_model_card.md").exists()


def test_a_tokenizer_is_loaded_too(folder, tmp_path, monkeypatch):
    theirs = shutil.copytree(folder / "hub" / "local" / "tiny", tmp_path / "theirs")
    tokenizer = Tokenizer(models.WordLevel({"ring": 7, "<unk>": 0}, unk_token="<unk>"))
    tokenizer.save(str(theirs / "tokenizer.json"))
    (theirs / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    from_hf(theirs, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert names_of(tmp_path / "back", monkeypatch)["tokenizer"]("ring").input_ids == [7]
    assert Parsed(tmp_path / "back").fact("Base model") == {"name": f"`{theirs}`"}


def copy_of_run(folder, tmp_path):
    shutil.copytree(folder / "run" / "stage-2-64", tmp_path / "copy")
    return tmp_path / "copy"


def rewrite(path, change):
    content = read(path)
    content.pop("ringformer_checksum")  # changed on purpose
    change(content)
    path.write_text(json.dumps(content))


def test_what_is_not_known_is_left_out(folder, tmp_path):
    """A store of other documents, a predecessor that went on, evaluations of another step."""
    run = copy_of_run(folder, tmp_path)
    (tmp_path / "rows.jsonl").write_text((folder / "rows.jsonl").read_text()[:-1000].rpartition("\n")[0])
    source = [f"--source=jsonl:{tmp_path}/rows.jsonl", f"--store={tmp_path}/other", "--held_out=0.3"]
    assert main(["data", "prepare", "--tokenizer=bytes", *source]) == 0
    rewrite(run / "config.json", lambda x: x["data"].update(store=str(tmp_path / "other")))
    rewrite(run / "identity.json", lambda x: x["identity"]["init_from"].update(checkpoint="0" * 32))
    (run / "changes.jsonl").write_text('{"step": 1, "changes": {"batch_size": [4, 8]}}\n')
    cases = run / "evals" / "perplexity" / "cases.jsonl"
    for path in (cases, run / "evals" / "report" / "report.json"):
        path.write_text(re.sub(r'"checkpoint": "\w+"', '"checkpoint": "0"', path.read_text()))
    to_hf(run, tmp_path / "back")
    card = Parsed(tmp_path / "back")
    assert card.fact("Data") == {"store": f"`{tmp_path}/other`"}
    assert card.fact("Base model") == {"name": f"`{folder}/run/stage-1-32`"} and "base_model" not in card.data
    header, *runs = card.tables[0]
    assert [cells[header.index("tokens")] for cells in runs] == ["-"]
    assert card.headings == ["Qwen3ForCausalLM", "Load in this folder", "Training"]


def test_a_mixture_has_the_share_of_each_store(folder, tmp_path):
    """The second store is a copy, which its contents prove."""
    run, stores = copy_of_run(folder, tmp_path), [folder / "store", tmp_path / "copy-of-store"]
    shutil.copytree(*stores)
    ((digest, _),) = read(run / "identity.json")["identity"]["data.store"]["train"]
    mixture = ",".join(f"{store}:{share}" for store, share in zip(stores, (7, 3), strict=True))
    rewrite(run / "config.json", lambda x: x["data"].update(store="", mixture=mixture))
    rewrite(run / "identity.json", lambda x: x["identity"]["data.store"].update(train=[[digest, 7], [digest, 3]]))
    to_hf(run, tmp_path / "back")
    shares = [
        re.match(r"Data: store `(.*)`, share (\d), source .* documents \d+", fact)
        for fact in Parsed(tmp_path / "back").facts
    ]
    assert [match.groups() for match in shares if match] == [(str(stores[0]), "7"), (str(stores[1]), "3")]


HOSTILE = "a|b`c\n---\nlicense: mit\n# d\n```\n<script>\x1b[2J\u202e"


def test_texts_of_strangers_stay_texts(folder, tmp_path):
    """In every place that a folder fills: the metadata, headings, tables and blocks stay as they are."""
    run, honest = copy_of_run(folder, tmp_path), Parsed(folder / "export")
    rewrite(run / "config.json", lambda x: x["data"].update(store=HOSTILE))
    hostile = {"data.tokenizer": HOSTILE, "data.packed_attention": HOSTILE, "model.rope_scaling": {HOSTILE: HOSTILE}}
    hostile["init_from"] = {"at": f"hf://local/tiny@1\n{HOSTILE}"}
    rewrite(run / "identity.json", lambda x: x["identity"].update(hostile))
    rows = rows_of(run / "metrics.jsonl")
    rows[-1]["eval_by_position"][0]["tokens"] = HOSTILE
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "changes.jsonl").write_text(f"{HOSTILE}\n")
    (run / "evals" / "perplexity" / "table.txt").write_text(HOSTILE)
    report = read(run / "evals" / "report" / "report.json")
    report["lines"][0] |= {"task": HOSTILE, "unit": HOSTILE}
    (run / "evals" / "report" / "report.json").write_text(json.dumps(report))
    (run / "evals" / "perplexity").rename(run / "evals" / "a`b|c")
    (run / "base_model_card.md").write_text(
        '---\nlicense: "mit\nlicense_name: a: b\nlicense_link: [x]\n---\nlicense: mit\n'
    )
    to_hf(run, tmp_path / "back")
    card = Parsed(tmp_path / "back")
    assert card.data == {"library_name": "transformers", "tags": ["ringformer"]}
    assert [len(table) for table in card.tables] == [2, *map(len, honest.tables[1:])]
    assert [{*map(len, table)} for table in card.tables] == [{len(table[0])} for table in honest.tables]
    assert len(card.headings) == len(honest.headings) and len(card.blocks) == 2 and card.html == []
    assert all(c.isprintable() or c == "\n" for c in card.text)


def test_the_origin_of_a_stranger_is_no_metadata(folder, tmp_path):
    base = shutil.copytree(folder / "base", tmp_path / "base")
    (base / "manifest.json").unlink()  # changed on purpose
    for origin in (f"hf://{HOSTILE}@1", f"hf://local/tiny{HOSTILE}@1", HOSTILE, ["hf://local/tiny@1"]):
        content = read(base / "config.json") | {"origin": origin, "adapters": HOSTILE}
        (base / "config.json").write_text(json.dumps(content))
        to_hf(base, tmp_path / "back")
        card = Parsed(tmp_path / "back")
        assert (
            "base_model" not in card.data
            and card.headings == ["Qwen3ForCausalLM", "Load in this folder"]
            and card.html == []
        )
        shutil.rmtree(tmp_path / "back")


def test_a_link_out_of_the_run_is_refused(folder, tmp_path, capsys):
    run = copy_of_run(folder, tmp_path)
    table = run / "evals" / "perplexity" / "table.txt"
    table.unlink()
    (tmp_path / "secret").write_text("hunter2")
    table.symlink_to(tmp_path / "secret")
    assert main(["convert", "to-hf", str(run), str(tmp_path / "back")]) == 2
    assert "table.txt is a link to" in capsys.readouterr().err and not (tmp_path / "back").exists()
