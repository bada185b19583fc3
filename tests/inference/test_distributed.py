"""Two processes, with four simulated devices each, share one prompt: both see every token, and it is one device's."""

import json
import socket
import subprocess
import sys

import pytest

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
found = model.generate(prompts, max_new_tokens=8), [x.tolist() for x in model.token_losses(prompts[:1])]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_processes_share_a_prompt(tmp_path):
    from_hf(save_model(tmp_path / "theirs", "llama_3"), tmp_path / "ours")
    alone = Generator.load(tmp_path / "ours", max_length=64, compute_dtype="float32")
    expected = alone.generate(PROMPTS, max_new_tokens=8)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-c", PROCESS.format(prompts=PROMPTS), address]
    processes = [
        subprocess.Popen(
            [*command, str(i), tmp_path / "ours"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=cpu_environment(),
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    for out, _ in said:
        written, losses = json.loads(out.splitlines()[-1])
        assert written == expected
        assert losses[0] == pytest.approx(alone.token_losses(PROMPTS[:1])[0].tolist(), abs=1e-4)
