"""`ringformer generate`: text to stdout, speed to stderr, and mistakes in one line before a model is loaded."""

import argparse
import io
import sys
from typing import get_args, get_type_hints

import pytest

from ringformer.checkpoints.rope_change import RopeChange
from ringformer.cli import main
from ringformer.inference.cache.arrays import CacheDtype
from ringformer.inference.generator import Generator
from ringformer.inference.options import add_model_options
from ringformer.inference.sampling import Sampling
from ringformer.models.decoder_config import DecoderConfig
from tests.data.chat_samples import sentencepiece
from tests.inference.fake_generator import FakeGenerator
from tests.inference.runs import converted_folder, run_folder
from tests.terminal import on_terminal

SPEED = "prefill 1,000.0 tokens/s, decode 10.0 tokens/s\n"
CPU = "the fastest on CPUs; --compute_dtype=bfloat16, which takes half of the memory, is the dtype of "


@pytest.fixture
def loaded(monkeypatch):
    """Answers for the model to give; then the FakeGenerators that were loaded and with what."""

    class Loaded(list):
        script = ()

    found = Loaded()

    def load(run, **options):
        found.append((FakeGenerator(found.script, options["max_length"]), options))
        return found[-1][0]

    monkeypatch.setattr(Generator, "load", load)
    return found


@pytest.fixture
def run(tmp_path):
    return run_folder(tmp_path / "run", "bytes", format="sharegpt", template="vicuna")


def spell(text):
    return [*text.encode(), 256]


def type_in(monkeypatch, *lines):
    """A terminal at which somebody types; an exception among the lines is a key such as Ctrl-C."""
    keys = iter([*lines, EOFError()])

    def read(prompt=""):
        line = next(keys)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)


def test_a_prompt_is_continued(run, loaded, capsys):
    loaded.script = [[spell(" carries 日本\n")]]
    assert (
        main(
            [
                "generate",
                f"--run={run}",
                "--prompt=The ring",
                "--max_new_tokens=20",
                "--mesh_dim=1,1,1,2",
                "--prefill_chunk=8",
                "--compute_dtype=float32",
                "--q_chunk=4",
                "--k_chunk=16",
                "--rope_theta=4e5",
                "--temperature=0.5",
                "--seed=3",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert out == " carries 日本\n\n" and err == f"prompt of 8 tokens; {SPEED}"
    ((generator, options),) = loaded
    assert options == {
        "mesh_dim": "1,1,1,2",
        "max_length": 28,
        "prefill_chunk": 8,
        "compute_dtype": "float32",
        "cache_dtype": "compute",
        "kernel": "auto",
        "kernel_check": True,
        "q_chunk": 4,
        "k_chunk": 16,
        "rope": RopeChange(rope_theta=4e5),
    }
    assert generator.sessions[0].appended == [[list(b"The ring")]]
    assert generator.samplings == [Sampling(0.5, seed=3)]


HOSTILE = b"a\x1b[2J\x1b]0;mine\x07\x1b]52;c;eA==\x07\xc2\x9b2J\x9b2J\rb\n\tc"


@pytest.mark.parametrize("chat", (False, True))
def test_on_a_terminal_commands_to_it_are_seen_and_elsewhere_they_are_text(run, loaded, chat, capsys, monkeypatch):
    """Each byte is a token, so that every sequence comes in pieces."""
    loaded.script = [[[*HOSTILE, 256]], [[*HOSTILE, 256]]]
    words = ["generate", f"--run={run}", "--max_new_tokens=60", "--allow_longer", "--max_length=400"]
    with on_terminal(monkeypatch) as shown:
        type_in(monkeypatch, "q")
        assert main([*words, *["--chat"] * chat]) == 0
    expected = r"a\x1b[2J\x1b]0;mine\x07\x1b]52;c;eA==\x07\x9b2J\udc9b2J\x0db"
    assert shown() == f"{expected}\n\tc\n\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("q"))
    assert main([*words, "--prompt=q", *["--chat"] * chat]) == 0
    assert capsys.readouterr().out == f"{HOSTILE.decode(errors='surrogateescape')}\n".replace("\udc9b", "?")


@pytest.mark.parametrize("source", ("file", "stdin"))
def test_a_prompt_of_a_file_or_of_stdin_as_it_is(run, loaded, source, tmp_path, monkeypatch, capsys):
    loaded.script = [[spell("yes USER: no")]]
    (tmp_path / "prompt").write_bytes("é\r\n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\r\n".encode())))
    words = [f"--prompt_file={tmp_path}/prompt"] if source == "file" else []
    assert main(["generate", f"--run={run}", *words, "--max_new_tokens=40", "--stop=USER:", "--stop=never"]) == 0
    assert capsys.readouterr().out == "yes \n"
    assert loaded[0][0].sessions[0].appended == [[list("é\r\n".encode())]]


def test_an_answer_by_the_run_s_template(tmp_path, loaded, capsys):
    run = run_folder(tmp_path / "run", str(sentencepiece(tmp_path)), format="sharegpt", template="llama2")
    loaded.script = [[[5, 2]]]
    words = ["--chat", "--system=Be a ring.", "--prompt=what?", "--allow_longer", "--max_new_tokens=9"]
    assert main(["generate", f"--run={run}", *words]) == 0
    from ringformer.data import load_tokenizer

    (appended,) = loaded[0][0].sessions[0].appended
    said = load_tokenizer(str(run / "tokenizer.model")).decode(appended[0])
    assert said == "[INST] <<SYS>>\nBe a ring.\n<</SYS>>\n\nwhat? [/INST]" and appended[0][0] == 1


def test_a_conversation_at_a_terminal(run, loaded, monkeypatch, capsys):
    """Ctrl-C ends an answer, an empty line is none, what does not fit is said, and Ctrl-D leaves."""
    loaded.script = [[spell("b")], [spell("d")]]
    type_in(monkeypatch, "a", "", "x" * 4000, "c")
    words = ["--chat", "--max_length=400", "--allow_longer", "--max_new_tokens=9"]
    assert main(["generate", f"--run={run}", *words]) == 0
    out, err = capsys.readouterr()
    assert out == "b\nd\n\n"
    assert err.count(SPEED) == 2 and "ringformer generate: a prompt of 4," in err and "again" not in err
    ((generator, _),) = loaded
    (session,) = generator.sessions
    assert bytes(i for i in session.rows[0] if i < 256).endswith(b"USER: a ASSISTANT: bUSER: c ASSISTANT: d")


def test_prompts_at_a_terminal_know_nothing_of_one_another(run, loaded, monkeypatch, capsys):
    loaded.script = [[spell("b")], [spell("d")]]
    type_in(monkeypatch, "a", "c", KeyboardInterrupt())
    assert main(["generate", f"--run={run}", "--max_new_tokens=9"]) == 130
    assert capsys.readouterr().out == "b\nd\n\n"
    (session,) = loaded[0][0].sessions
    assert session.appended == [[[97]], [[99]]] and session.rows == [spell("cd")]
    assert loaded[0][1]["max_length"] == 64, "the context of the run"


def test_ctrl_c_leaves_with_the_text_so_far(run, loaded, monkeypatch, capsys):
    loaded.script = [[spell("yes")]]
    real = FakeGenerator.session

    def session(self, rows):
        made = real(self, rows)
        steps = made.decode

        def decode(**options):
            iterator = steps(**options)
            yield next(iterator)
            raise KeyboardInterrupt

        made.decode = decode
        return made

    monkeypatch.setattr(FakeGenerator, "session", session)
    assert main(["generate", f"--run={run}", "--prompt=a", "--max_new_tokens=9"]) == 130
    out, err = capsys.readouterr()
    assert out == "y\n" and err == f"computing in float32, {CPU}{run}\nprompt of 1 tokens; {SPEED}"


def test_a_command_that_names_a_dtype_computes_in_it(run, loaded, capsys):
    """And says nothing of it; on a CPU the default is float32."""
    loaded.script = 2 * [[spell("yes")]]
    for option, dtype in (("--compute_dtype=bfloat16", "bfloat16"), ("--max_new_tokens=3", "float32")):
        assert main(["generate", f"--run={run}", "--prompt=a", "--max_new_tokens=3", option]) == 0
        assert ("computing in" in capsys.readouterr().err) == (dtype == "float32")
        assert loaded[-1][1]["compute_dtype"] == dtype


def test_after_a_stop_string_only_the_rest_of_the_conversation_is_read(run, loaded, monkeypatch, capsys):
    loaded.script = [[spell("b STOP c")], [spell("d")]]
    type_in(monkeypatch, "a", "c")
    words = ["--chat", "--max_length=600", "--allow_longer", "--max_new_tokens=9", "--stop=STOP"]
    words += ["--compute_dtype=bfloat16"]
    assert main(["generate", f"--run={run}", *words]) == 0
    out, err = capsys.readouterr()
    (session,) = loaded[0][0].sessions
    ((first,), (second,)) = session.appended
    assert (
        out == "b \nd\n\n" and err == f"prompt of {len(first)} tokens; {SPEED}prompt of {len(second)} tokens; {SPEED}"
    )
    assert bytes(i for i in session.rows[0] if i < 256).endswith(b"USER: a ASSISTANT: b USER: c ASSISTANT: d")
    assert len(second) < 25 < len(first)


MISTAKES = [
    (["--prompt="], "the prompt is empty"),
    (["--prompt=a", "--prompt_file=b"], "--prompt_file: not allowed with argument --prompt"),
    (["--prompt=a", "--system=b"], "--system is the system message of a --chat"),
    (["--prompt=a", "--template_option=a=1"], "--template_option sets variables of the template of a --chat"),
    (["--prompt_file=none/there"], "--prompt_file=none/there cannot be read: No such file or directory"),
    (["--prompt_file=GARBAGE"], "is not UTF-8: byte 0x89 at 3 of 5"),
    (["--prompt=a\udcff"], "is not UTF-8"),
    (["--prompt=" + "a" * 60, "--max_new_tokens=9"], "limit of 64 tokens: at most 4 new tokens fit after this prompt"),
    (["--prompt=a"], "and 256 new ones exceed the limit of 64 tokens"),
    (["--prompt=a", "--max_length=65"], "--max_length=65 exceeds the context of 64 tokens"),
    (["--prompt=a", "--max_length=1"], "exceed the limit of 1 tokens: the prompt alone fills it"),
    (["--prompt=a", "--max_new_tokens=0"], "max_new_tokens=0 must be at least 1"),
    (["--prompt=a", "--temperature=-1"], "temperature=-1"),
    (["--prompt=a", "--temperature=nan"], "temperature=nan"),
    (["--prompt=a", "--temperature=1", "--top_p=1.5"], "top_p=1.5"),
    (["--prompt=a", "--temperature=1", "--top_k=0"], "top_k=0"),
    (["--prompt=a", "--top_k=5"], "top_k"),
    (["--prompt=a", "--stop="], "a stop string is empty"),
    (["--prompt=a", "--stop=☃"], "the stop string '☃' can never occur"),
    (["--prompt=a", "--rope_theta=0.5"], "rope_theta=0.5 must be above 1"),
    (["--prompt=a", "--rope_scaling.factor=2"], "--rope_scaling.factor needs --rope_scaling.kind"),
    (["--prompt=a", "--cpu_devices=-1"], "cpu_devices=-1 must lie between 0 and 1,024"),
    (["--prompt=a", "--cpu_devices=100000"], "cpu_devices=100,000 must lie between 0 and 1,024"),
    (["--prompt=a", "--mesh_dim=2,1,1,1"], "--mesh_dim=2,1,1,1: dp=2 distributes rows, but a prompt is a single row"),
    (["--prompt=a", "--mesh_dim=-1,1,1,1"], "dp=-1 distributes rows"),
    (["--prompt=a", "--chat"], "was not trained on conversations"),
    (["--prompt=a", "--chat", "--template=llama3"], "needs <|begin_of_text|>"),
    (["--prompt=a", "--tokenizer=none.json"], "there is no tokenizer file none.json"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_a_mistake_is_one_line_and_no_model_is_loaded(words, said, tmp_path, loaded, capsys):
    run = run_folder(tmp_path / "run", str(_without_bytes(tmp_path)))
    (tmp_path / "garbage").write_bytes(b"abc\x89\n")
    assert main(["generate", f"--run={run}", *(w.replace("GARBAGE", f"{tmp_path}/garbage") for w in words)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("ringformer generate: ") and said in err
    assert not loaded


def test_more_tokens_than_positions_count_are_refused_before_the_weights_are_read(run, capsys):
    """With the real Generator, of a run without weights; the largest is not refused for its size."""
    words = ["generate", f"--run={run}", "--prompt=a", "--allow_longer"]
    assert main([*words, "--max_new_tokens=3000000000"]) == 2
    assert "max_length=3,000,000,001 must be" in (err := capsys.readouterr().err)
    assert "at most 2,147,483,647, because positions have 32 bits" in err
    assert main([*words, f"--max_new_tokens={2**31 - 2}"]) == 2
    assert "there is no checkpoint in this folder" in capsys.readouterr().err


def _without_bytes(folder):
    """A tokenizer that cannot spell everything: one token a letter."""
    import sentencepiece as library

    with (folder / "small.model").open("wb") as file:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(["the ring carries keys"] * 9),
            model_writer=file,
            vocab_size=30,
            model_type="char",
            minloglevel=2,
            hard_vocab_limit=False,
            add_dummy_prefix=False,
        )
    return folder / "small.model"


def test_folders_that_are_no_run(tmp_path, loaded, capsys):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    spoiled = run_folder(tmp_path / "spoiled", str(sentencepiece(tmp_path)))
    (spoiled / "tokenizer.model").unlink()
    for folder, said in (
        ("none", "there is no folder"),
        ("hf", "ringformer convert from-hf"),
        ("spoiled", "holds no tokenizer: set --tokenizer to bytes"),
    ):
        assert main(["generate", f"--run={tmp_path / folder}", "--prompt=a"]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
    assert not loaded


def test_a_model_that_names_no_context_needs_a_length_at_a_terminal(tmp_path, loaded, monkeypatch, capsys):
    model = converted_folder(tmp_path / "model", sentencepiece(tmp_path).parent)
    type_in(monkeypatch, "a")
    assert main(["generate", f"--run={model}"]) == 2
    assert "set --max_length" in capsys.readouterr().err
    loaded.script = [[[2]]]
    assert main(["generate", f"--run={model}", "--max_length=300"]) == 0
    assert loaded[0][1]["max_length"] == 300


def test_choices_are_those_of_the_model():
    """Help shows them without JAX, so they are written again."""
    parser = argparse.ArgumentParser()
    add_model_options(parser, "a run")
    choices = {action.dest: action.choices for action in parser._actions}
    types = get_type_hints(DecoderConfig)
    for name in ("kernel", "compute_dtype"):
        assert choices[name] == literals(types[name])
    assert choices["cache_dtype"] == get_args(CacheDtype)


def literals(annotation) -> tuple[str, ...]:
    """The strings of a Literal, also of one within another."""
    found: tuple[str, ...] = ()
    for choice in get_args(annotation):
        found += (choice,) if isinstance(choice, str) else literals(choice)
    return found
