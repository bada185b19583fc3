"""An attention of one's own inside a family: trained over a ring, resumed as itself, estimated, generated from."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from ringformer import register_attention, ring_attention
from ringformer.cli import main
from ringformer.convert.hf_config import to_hf_config
from ringformer.estimate.closed_forms.training import peak_bytes
from ringformer.estimate.workloads.programs import lower_attention
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import preset_workload
from ringformer.inference.generator import Generator
from ringformer.inference.inference_config import inference_config
from ringformer.models.own_attention import REGISTERED
from ringformer.models.registry import FAMILIES, preset_config
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.runs.identity import run_identity
from ringformer.train.state import make_init
from tests.helpers import relative_error
from tests.inference.models import CONFIG, generator
from tests.models.test_families import tiny
from tests.runs.test_identity import config as run_config
from tests.train.runs import read_metrics
from tests.train.test_step import trained

ROOT = Path(__file__).parents[2]

WINDOW, PROMPT = 7, [5, 9, 20, 3, 1]


def attend(q, k, v, *, window=None, **options):
    return ring_attention(q, k, v, window=WINDOW, **options)


@pytest.fixture
def local():
    register_attention("local", attend, visible=lambda query, key, window: key > query - WINDOW)
    yield "local"
    del REGISTERED["local"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3"])
def test_a_family_trains_with_it(local, family):
    """As the same window of its own: the loss and the gradient of every parameter."""
    plain = {"layer_types": "F", "window": 0}
    found = trained("1,1,1,8", tiny(family, attention=local, **plain), steps=1)
    expected = trained("1,1,1,8", tiny(family, layer_types="W", window=WINDOW), steps=1)
    assert relative_error(found[0][0]["loss"], expected[0][0]["loss"]) <= 1e-6
    assert max(jax.tree.leaves(jax.tree.map(relative_error, found[1], expected[1]))) <= 1e-5
    full = trained("1,1,1,8", tiny(family, **plain), steps=1)
    assert relative_error(found[0][0]["loss"], full[0][0]["loss"]) > 1e-4


@pytest.mark.slow
def test_it_writes_as_the_window_that_it_is(local):
    own, windowed = replace(CONFIG, attention=local), replace(CONFIG, window=WINDOW)
    texts = [generator(c, "1,1,1,4").generate([PROMPT * 3], max_new_tokens=20) for c in (own, windowed)]
    assert texts[0] == texts[1]
    session = generator(own, "1,1,1,4").session(1)
    session.append([PROMPT])
    with pytest.raises(ValueError, match="a model with attention 'local' reads all of its text at once"):
        session.append([PROMPT])


@pytest.mark.slow
def test_its_mask_alone_decides_in_layers_with_windows():
    """It sees more than the windows of some layers; what is decoded has the losses of a whole forward pass."""
    register_attention(
        "wide",
        lambda q, k, v, *, window=None, **options: ring_attention(q, k, v, window=30, **options),
        visible=lambda query, key, window: key > query - 30,
    )
    try:
        config = tiny("gemma3", attention="wide", window=8)
        mesh = make_mesh("1,1,1,4", jax.devices()[:4])
        params = make_init(config, weight_shardings(config, mesh), mesh, 0)()
        model = Generator(config, params, mesh, max_length=96)
        session, text, found = model.session(1), [*PROMPT * 8], []
        session.append([text])
        for (token,) in session.decode(max_new_tokens=12):
            text.append(token)
            found.append(session.logits[0])
        expected = model.token_losses([[*text, 7]])[0]
        losses = [
            float(jax.nn.logsumexp(x) - x[token]) for x, token in zip(found, [*text[len(text) - 11 :], 7], strict=True)
        ]
        assert max(abs(a - b) for a, b in zip(losses, expected[-12:], strict=True)) <= 1e-4
    finally:
        del REGISTERED["wide"]


def test_without_a_mask_for_decoding_it_only_trains():
    register_attention("blind", attend)
    try:
        with pytest.raises(ValueError, match=r"attention 'blind' was registered without visible\(query, key, window\)"):
            inference_config(replace(CONFIG, attention="blind"), make_mesh("1,1,1,1", jax.devices()[:1]), 64)
    finally:
        del REGISTERED["blind"]


def test_transformers_has_it_not(local):
    with pytest.raises(ValueError, match="attention 'local', which transformers' LlamaForCausalLM has not"):
        to_hf_config(replace(CONFIG, attention=local), max_position=64, dtype="float32", token_ids={})


def test_it_is_part_of_a_runs_identity(local):
    """ringformer's own attentions compute the same; this one does not."""
    kinds = {
        name: run_identity(run_config(model=replace(CONFIG, attention=name)), "bytes")["model.attention"]
        for name in ("ring", "vanilla", local)
    }
    assert kinds == {"ring": "ring", "vanilla": "ring", local: local}


def test_estimates_compile_it(local):
    workload = preset_workload("tiny", find_target("v5e-4"), 4096, attention=local)
    assert peak_bytes(workload) > 0 and workload.ring_size == 4
    pytest.importorskip("libtpu")
    text = lower_attention(workload.with_kernel()[0]).lowered.as_text()
    plain = lower_attention(replace(workload, model=replace(workload.model, attention="ring")).with_kernel()[0])
    assert text != plain.lowered.as_text()


def test_names_that_cannot_be():
    with pytest.raises(ValueError, match="attention 'ring' is registered already"):
        register_attention("ring", attend)
    with pytest.raises(ValueError, match=r"unknown attention 'nowhere'; known: vanilla, .*; a config file may"):
        replace(CONFIG, attention="nowhere")
    assert not REGISTERED


def blocks_of(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    return [block.partition("```")[0] for block in text.split("```python\n")[1:]]


@pytest.mark.slow
def test_the_window_of_the_how_to_trains(tmp_path):
    """The page's config as it stands, on a smaller model: two steps on a ring of eight, as with the family's window."""
    page = blocks_of("docs/how-to/another-model.md")[0]
    assert len([line for line in page.splitlines() if line]) == 9
    (tmp_path / "mine.py").write_text(page)
    (tmp_path / "text.txt").write_text("the ring carries blocks of keys and values around " * 400)
    small = {"hidden_size": 32, "intermediate_size": 40, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    small |= {"head_dim": 8, "vocab_size": 257, "q_chunk": 64, "k_chunk": 64}
    common = {"seq_len": 2048, "batch_size": 1, "steps": 2, "mesh_dim": "1,1,1,8", "eval_every": 0}
    common |= {"data.store": tmp_path / "store", "data.source": f"text:{tmp_path}/text.txt", "data.held_out": 0.0}
    words = [f"--config.model.{name}={value}" for name, value in (small | {"compute_dtype": "float32"}).items()]
    words += [f"--config.{name}={value}" for name, value in common.items()]
    try:
        train = ["train", f"--config={tmp_path}/mine.py", *words]
        assert main([*train, f"--config.run_dir={tmp_path}/a"]) == 0
        windowed = ["--config.model.attention=ring", "--config.model.window=512", "--config.model.layer_types=W"]
        del REGISTERED["local"]
        assert main([*train, f"--config.run_dir={tmp_path}/b", *windowed]) == 0
    finally:
        REGISTERED.pop("local", None)
    losses = [[row["loss"] for row in read_metrics(str(tmp_path / run)) if "loss" in row] for run in "ab"]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_decoder_of_the_how_to_is_a_family():
    """The page's class is built, counted and refused on meshes as those of ringformer."""
    names: dict = {"__name__": "mine"}
    exec(compile(blocks_of("docs/how-to/another-model.md")[1], "another-model.md", "exec"), names)
    try:
        config = preset_config("mine_tiny")
        shapes = jax.tree.leaves(abstract_model(config)[1])
        assert sum(math.prod(x.shape) for x in shapes) == config.num_params and config.letters == "WWWF"
    finally:
        del FAMILIES["mine"]
