"""The command line: what a person sees who asks for help, and who makes a mistake."""

import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import jax
import pytest

import ringformer
from ringformer.cli import command_line, main
from ringformer.cli.command_line import GROUPS, VERBS, make_parsers
from ringformer.models.registry import FAMILIES

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.py"


def test_every_verb_has_help(capsys):
    for verb in VERBS:
        assert main([*verb.split(), "--help"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith(f"usage: ringformer {verb}") and not err
    for group in GROUPS:
        assert main([group, "--help"]) == 0
        out = capsys.readouterr().out
        assert all(verb.split()[1] in out for verb in VERBS if verb.startswith(group))


def plain_name(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def base_distributions(names):
    """The distributions that these need, and those that they need, without extras."""
    needed, waiting = set(), [*names]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            with suppress(metadata.PackageNotFoundError):
                waiting += [plain_name(r) for r in metadata.requires(name) or () if "extra ==" not in r]
    return needed


def test_every_verb_has_help_without_the_extras():
    """As in an installed wheel: importing what only extras bring fails. The control is the training itself."""
    project = tomllib.loads((QUICKSTART.parents[1] / "pyproject.toml").read_text())["project"]
    base = base_distributions(map(plain_name, project["dependencies"]))
    extras = {plain_name(r) for rs in project["optional-dependencies"].values() for r in rs} - base - {"ringformer"}
    brought = [m for m, of in metadata.packages_distributions().items() if {plain_name(d) for d in of} <= extras]
    assert {"xxhash", "ml_collections", "tokenizers", "safetensors"} <= {*brought}
    code = (
        f"import sys; sys.modules |= dict.fromkeys({brought}); from ringformer.cli import main; "
        f"codes = [main([*verb.split(), '--help']) for verb in {[*VERBS]}]; "
        f"codes.append(main(['train', '--config={QUICKSTART}'])); print(codes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str([0] * len(VERBS) + [2])
    assert done.stderr == "ringformer train: ml_collections is not installed: pip install 'ringformer[train]'\n"
    assert "\n  --config.optimizer.learning_rate = 0.0003\n" in done.stdout


def test_the_help_of_train_loads_no_jax():
    """The control reads the same keys from their classes."""
    loaded = "print('jax' in sys.modules)"
    for statement, expected in (("main(['train', '--help'])", "False"), ("import ringformer.runs.config", "True")):
        code = f"import sys; from ringformer.cli import main; {statement}; {loaded}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == expected


def test_help_before_a_verb_is_help_of_it(capsys):
    assert main(["help", "data", "prepare"]) == 0
    assert capsys.readouterr().out.startswith("usage: ringformer data prepare")


def test_a_package_that_is_not_there_is_named(monkeypatch, capsys):
    """The base is installed without what trains."""
    monkeypatch.setitem(sys.modules, "ringformer.runs.config_file", None)
    assert main(["train", f"--config={QUICKSTART}"]) == 2
    assert "is not installed: pip install 'ringformer[train]'\n" in capsys.readouterr().err


@pytest.mark.parametrize("words", ([], ["help"], ["--help"], ["-h"]))
def test_help_names_every_verb(words, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(verb.split()[0] in out for verb in VERBS)


def test_help_loads_nothing_heavy_and_is_quick():
    """Half a second of the processor, and no JAX: names are loaded when they are asked for."""
    code = (
        "import sys, time; from ringformer.cli import main; main(['--help']); "
        "print([m for m in ('jax', 'numpy', 'flax', 'rich') if m in sys.modules], time.process_time())"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    ends = [run.stdout.splitlines()[-1] for run in runs]
    assert all(end.startswith("[] ") for end in ends)
    assert min(float(end.split()[-1]) for end in ends) < 0.5


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ringformer {ringformer.__version__}\n"


def test_keys_of_a_config_and_what_they_mean(capsys):
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for key in ("seq_len = 4096", "optimizer.b2 = 0.95", "data.chat_length = 0", "model.layout = 'zigzag'"):
        assert f"--config.{key}" in out
    assert "Most tokens of a conversation; longer ones are split between turns; 0: no limit." in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "unknown verb 'trian'; did you mean 'train'?"),
        (["data", "prepar"], "unknown verb 'data prepar'; did you mean 'data prepare'?"),
        (["dota", "prepare"], "unknown verb 'dota'; did you mean 'data'?"),
        (["data"], "the following arguments are required: VERB"),
        (["train"], "the following arguments are required: --config"),
        (["train", "--confg=x"], "there is no option --confg; did you mean --config?"),
        (["train", "--config=none.py"], "there is no config file none.py"),
        (["train", f"--config={QUICKSTART}", "--stage=2"], "--stage=2: the config has no stages"),
        (["train", f"--config={QUICKSTART}", "--stage=x"], "argument --stage: invalid int value: 'x'"),
        (["train", "--config", str(QUICKSTART), "steps=3"], "unexpected arguments: steps=3; overrides look like"),
        (["train", f"--config={QUICKSTART}", "--config.optimizer.learning_rat=1"], 'Did you mean "learning_rate"'),
        (["train", f"--config={QUICKSTART}", "--process_id=1"], "need --distributed"),
        (["data", "inspect", "a", "b"], "unexpected arguments: b"),
        (["--vresion"], "there is no option --vresion; did you mean --version?"),
        (["data", "inspect", "s", "--ring=8"], "there is no option --ring; did you mean --ring_size?"),
        (["generate", "--run=r", "--kernel=xlaa"], "--kernel: invalid choice: 'xlaa' (choose from 'auto', 'xla',"),
        (["eval", "lines", "--run=r", "--chat=maybe"], "ignored explicit argument 'maybe'"),
        (["train", "--conifg.steps=1"], "there is no option --conifg.steps; did you mean --config.steps?"),
        (["train", f"--config={QUICKSTART}", "--target=x"], "there is no option --target; see ringformer train --help"),
        (["train", f"--config={QUICKSTART}", "-config.steps=1"], "there is no option -config.steps"),
        (["train", f"--config={QUICKSTART}", "--config.cpu_devices=-1"], "cpu_devices=-1 must be at least 0"),
        (["train", f"--config={QUICKSTART}", "--config.model.q_chunk=-1"], "q_chunk=-1 must be positive"),
        (["estimate", f"--config={QUICKSTART}", "--model=tiny", "--target=v5e-8"], "give one of them"),
        (["train", "--config", str(QUICKSTART), "--config.cpu_devices", "-1"], "cpu_devices=-1 must be at least 0"),
        (
            ["train", "--config", str(QUICKSTART), "--config.run_dir", "--config.seed=1"],
            "--config.run_dir needs a value",
        ),
        (["train", "--config", str(QUICKSTART), "--config.steps"], "--config.steps needs a value"),
        (["train", "--config", str(QUICKSTART), "--config.stepz", "3"], 'Did you mean "steps"'),
        (["train", "--confg", "x"], "there is no option --confg; did you mean --config?"),
        (["train", "--stage", "--distributed"], "--stage needs a value; one that begins with a dash follows an equals"),
        (["generate", "--prompt", "-hello"], "--prompt needs a value; one that begins with a dash follows an equals"),
        (["estimate", "--json", "true"], "the following arguments are required: --target"),
        (["estimate", "--json", "true", "--target", "v5e-8"], "unexpected arguments: true"),
        (["estimate", "--layout=round", "--target=v5e-8"], "invalid choice: 'round'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, said, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and said in err and err.startswith("ringformer ")


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (["train", "--config", "a.py", "--stage", "2"], ["--config=a.py", "--stage=2"]),
        (
            ["train", "--config.steps", "3", "--config.mesh_dim", "-1,1,1,8"],
            ["--config.steps=3", "--config.mesh_dim=-1,1,1,8"],
        ),
        (["train", "--config.debug_nans", "--config.seed", "1"], ["--config.debug_nans", "--config.seed=1"]),
        (["train", "--config.debug_nans", "false", "--distributed"], ["--config.debug_nans=false", "--distributed"]),
        (["train", "--config.run_dir=a", "b"], ["--config.run_dir=a", "b"]),
        (["estimate", "--mesh_dim", "-1,1,1,8", "--json"], ["--mesh_dim=-1,1,1,8", "--json"]),
        (["estimate", "--no-offload", "--config", "a b.py"], ["--no_offload", "--config=a b.py"]),
        (["estimate", "--offload=false", "--seq-len", "8"], ["--no_offload", "--seq_len=8"]),
        (["generate", "--chat=true", "--kernel-check=false"], ["--chat", "--no_kernel_check"]),
        (["generate", "--prompt", "- a list", "--temperature", "-1"], ["--prompt=- a list", "--temperature=-1"]),
        (["generate", "--prompt", ""], ["--prompt="]),
        (["checkpoint", "list", "runs/x"], ["runs/x"]),
    ],
)
def test_a_value_follows_its_option_with_a_space_or_an_equals_sign(words, joined):
    verb = command_line.find_verb(words)
    assert make_parsers(verb)[1].join_values(words[len(verb.split()) :]) == joined


def test_who_reads_no_further_sees_no_traceback():
    """`ringformer ... | head`"""
    command = [sys.executable, "-m", "ringformer.cli", "configs", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read() and process.wait() == 141


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ringformer tr", {"train "}),
        ("ringformer data i", {"inspect "}),
        ("ringformer train --st", {"--stage"}),
    ],
)
def test_completion(typed, offered, tmp_path):
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": typed,
        "COMP_POINT": str(len(typed)),
    }
    subprocess.run([sys.executable, "-m", "ringformer"], env=environment, check=True)
    assert {word.strip() for word in (tmp_path / "out").read_text().split("\n")} == {word.strip() for word in offered}


def test_public_names_are_where_the_package_says():
    """Loaded late, and each of them there; an unknown one is an AttributeError like any other's."""
    for name in ringformer.__all__:
        assert getattr(ringformer, name) is not None
    assert set(ringformer.__all__) <= set(dir(ringformer))
    for family in FAMILIES.values():
        if family.config.__module__.startswith("ringformer."):
            public = getattr(ringformer, family.config.__name__)
            assert [public(**ringformer.preset(name)) for name in family.presets] and public is family.config
    with pytest.raises(ValueError, match=r"unknown model 'qwen3'; known models: tiny, .*qwen3_8b"):
        ringformer.preset("qwen3")
    with pytest.raises(AttributeError, match="no attribute 'ring'"):
        ringformer.ring  # noqa: B018
    code = "import sys, ringformer; assert 'jax' not in sys.modules; ringformer.enter; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_only_the_chosen_verb_has_its_options():
    top, parser = make_parsers("train")
    assert parser.prog == "ringformer train" and parser.get_default("call") and not top.get_default("call")


def test_memory_that_python_lacks_is_one_line(monkeypatch, capsys):
    """As numpy says it for an array, and Python for anything else."""
    for error, line in (
        (MemoryError("Unable to allocate 9 EiB for an array"), "out of memory: Unable to allocate 9 EiB for an array"),
        (MemoryError(), "out of memory: Python got no more"),
    ):

        def call(_words, error=error):
            raise error

        monkeypatch.setattr(command_line, "run", call)
        assert main(["generate"]) == 1
        assert capsys.readouterr().err == f"ringformer generate: {line}\n"


def test_a_name_that_fills_the_screen_is_shortened(capsys):
    assert main(["train", f"--config={'x' * 5000}"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("ringformer train: [Errno 36] File name too long: 'xxx") and "xxx...xxx" in err
    assert len(err) < 300


def test_memory_that_does_not_suffice_is_one_line(monkeypatch, capsys):
    """As JAX says it for an array; any other RuntimeError is a bug, and a traceback."""

    def failing(why):
        def call(_words):
            raise jax.errors.JaxRuntimeError(why)

        monkeypatch.setattr(command_line, "run", call)

    failing("RESOURCE_EXHAUSTED: Out of memory allocating 96000000000 bytes.\nmore of it")
    assert main(["generate"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "out of device memory: RESOURCE_EXHAUSTED: Out of" in err
    failing("INTERNAL: Error dispatching computation: Out of memory allocating 102799998972 bytes.")  # on a CPU
    assert main(["generate"]) == 1
    assert "out of device memory: INTERNAL: Error dispatching" in capsys.readouterr().err
    failing("INTERNAL: no")
    with pytest.raises(jax.errors.JaxRuntimeError):
        main(["generate"])
