"""Released things as fixtures. Their folders are made once; what ringformer makes of them, once a run of the suite."""

from pathlib import Path

import pytest

from tests.released import folders


@pytest.fixture(scope="session")
def smol() -> Path:
    """SmolLM2-135M-Instruct as transformers saves it, in bfloat16, with its tokenizer and chat template."""
    return folders.smol()


@pytest.fixture(scope="session")
def smol_converted(smol, tmp_path_factory, worker_id) -> Path:
    """The same as `ringformer convert from-hf` writes it, in bfloat16. Tests only read it."""
    from ringformer.convert import from_hf

    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent  # which the workers of one run share

    def convert(out: Path) -> None:
        out.rmdir()
        from_hf(smol, out, "bfloat16")

    return folders.made_once(base / "smol_converted", convert)


@pytest.fixture(scope="session")
def trl_templates() -> dict[str, str]:
    return folders.trl_templates()


@pytest.fixture(scope="session")
def llama_cpp_templates() -> dict[str, str]:
    return folders.llama_cpp_templates()


@pytest.fixture(scope="session")
def released_tokenizer():
    """`released_tokenizer(name)`: the folder of one of `folders.TOKENIZERS`."""
    return folders.tokenizer


@pytest.fixture(scope="session")
def mistral_tokenizers() -> Path:
    return folders.mistral_tokenizers()
