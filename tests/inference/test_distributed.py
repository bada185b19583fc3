"""Two processes, with four simulated devices each, share one prompt: both see every token, and it is one device's. They
save and restore one session."""

import json
import socket
import subprocess
import sys

import pytest

from ringformer.cli import main
from ringformer.convert import from_hf
from ringformer.inference.generator import Generator
from tests.convert.models import save_model
from tests.cpu_flags import cpu_environment

PROMPTS = [[5, 9, 20, 3, 1, 2, 60, 33, 12, 7, 4], [1]]

PROCESS = """
import json, sys
import jax
address, process, folder = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(address, 2, int(process))
from ringformer.inference.generator import Generator
model = Generator.load(folder, mesh_dim="1,1,2,4", max_length=64, compute_dtype="float32")
prompts = {prompts}
found = [model.generate(prompts, max_new_tokens=8), [x.tolist() for x in model.token_losses(prompts[:1])]]
session = model.session(2)
session.append(prompts)
session.save(f"{{folder}}/session")
restored = model.restore_session(f"{{folder}}/session")
found += [[*zip(*x.decode(max_new_tokens=8))] for x in (session, restored)]
if process == "1":  # one process cannot read a chunk of its own, and both refuse
    next(iter(__import__("pathlib").Path(folder, "session", "keys").glob("0.*.3.0"))).write_bytes(b"")
from ringformer.processes.agreement import from_all
from_all(None)
try:
    model.restore_session(f"{{folder}}/session")
except OSError as error:
    found.append(str(error))
print(json.dumps(found))
"""


def free_address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def ended(commands):
    """The stdout and stderr of processes that run side by side, and their exit codes."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cpu_environment())
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    said = [process.communicate(timeout=400) for process in processes]
    return said, [process.returncode for process in processes]


@pytest.mark.slow
def test_two_processes_share_a_prompt(tmp_path):
    from_hf(save_model(tmp_path / "theirs", "llama_3"), tmp_path / "ours")
    alone = Generator.load(tmp_path / "ours", max_length=64, compute_dtype="float32")
    expected = alone.generate(PROMPTS, max_new_tokens=8)
    command = [sys.executable, "-c", PROCESS.format(prompts=PROMPTS), free_address()]
    said, codes = ended([*command, str(i), tmp_path / "ours"] for i in range(2))
    assert codes == [0, 0], said
    for out, _ in said:
        written, losses, saved, restored, refused = json.loads(out.splitlines()[-1])
        assert written == saved == restored == expected
        assert f"the session in {tmp_path}/ours/session is damaged" in refused and "3.0 has 0 bytes" in refused
        assert losses[0] == pytest.approx(alone.token_losses(PROMPTS[:1])[0].tolist(), abs=1e-4)


@pytest.mark.slow
def test_the_verb_of_two_processes_says_an_answer_once(tmp_path):
    """The one that a single process gives; and processes that were given two prompts say so."""
    from_hf(save_model(tmp_path / "theirs", "llama_3"), tmp_path / "ours")
    verb = [
        sys.executable,
        "-m",
        "ringformer.cli",
        "generate",
        f"--run={tmp_path}/ours",
        "--tokenizer=bytes",
        "--max_new_tokens=8",
        "--compute_dtype=float32",
    ]
    prompt = "--prompt=One ring to bind them"
    ((alone, _),), _ = ended([[*verb, prompt]])
    shared = [*verb, "--mesh_dim=1,1,1,8", "--cpu_devices=4", "--distributed", "--num_processes=2"]
    for second, codes, words in ((prompt, [0, 0], "prefill"), ("--prompt=Another", [2, 2], "the prompt's hash")):
        meeting = [*shared, f"--coordinator_address={free_address()}"]
        said, found = ended([*meeting, f"--process_id={i}", p] for i, p in enumerate((prompt, second)))
        assert found == codes and words in said[0][1], said
        assert [out for out, _ in said] == ([alone, ""] if codes == [0, 0] else ["", ""])


def test_several_processes_have_no_stdin_in_common(tmp_path, capsys):
    options = ["generate", f"--run={tmp_path}", "--num_processes=2", "--process_id=1", "--coordinator_address=a:1"]
    assert main([*options, "--distributed"]) == 2
    assert "several processes need the same prompt, and stdin belongs to one of them" in capsys.readouterr().err
    assert main([*options, "--prompt=a"]) == 2
    assert "need --distributed" in capsys.readouterr().err
