"""Table 1: the slopes of compiled temporaries, from temporaries that are a formula."""

import json
from types import SimpleNamespace

import pytest

from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.own_attention import ATTENTION
from ringformer.paper import activation_memory, attempts
from ringformer.paper.activation_memory import LENGTHS, grows_by, local_length, paper

MODEL = LlamaConfig(**preset("llama_7b"))


@pytest.mark.parametrize("kind", ATTENTION)
def test_what_does_not_grow_drops_out(kind):
    """Of 7 n^2 + 300 n + 10^9 for vanilla and of 300 n + 10^9 else, the constant goes and the rest stays."""
    square = 7 if kind == "vanilla" else 0
    n = local_length(kind)
    temporaries = [square * c * c + 300 * c + 10**9 for c in LENGTHS[kind]]
    assert grows_by(kind, temporaries) == pytest.approx(square * n * n + 300 * n)


def test_the_papers_forms():
    """At 8192 tokens of 7B in MiB: 8, 2 and 6 c h; 32 heads of logits, 2 n s^2, at 2048."""
    sizes = [paper(kind, MODEL, local_length(kind)) / 2**20 for kind in ATTENTION]
    assert sizes == [256, 256, 64, 192]


def test_fill_goes_on_where_it_was(tmp_path, monkeypatch):
    compiled = []

    def compile_apart(workload, program):
        compiled.append((workload.model.attention, workload.local_tokens))
        return SimpleNamespace(temp_bytes=2**30 + 10**5 * workload.local_tokens)

    monkeypatch.setattr(activation_memory, "compile_apart", compile_apart)
    monkeypatch.setattr(attempts, "compiled_by", lambda target: "a formula")
    path = tmp_path / "held.json"
    activation_memory.fill(path, lambda line: None)
    found = activation_memory.read(path)
    assert list(found) == list(ATTENTION) and len(compiled) == 2 * sum(map(len, LENGTHS.values()))
    assert found["ring"]["forward_bytes"] == pytest.approx(10**5 * 8192)
    assert found["ring"]["backward_bytes"] == pytest.approx(10**5 * 8192 - 2 * 2 * 8192 * 4096)
    del found["ring"]
    path.write_text(json.dumps({"kinds": found}))
    compiled.clear()
    activation_memory.fill(path, lambda line: None)
    assert {kind for kind, _ in compiled} == {"ring"}
