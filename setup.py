"""What pyproject.toml cannot say: configs/ and the launch scripts go into the wheel as folders of the package, and the
README of an index page leads to files that are not there.

README_FILES is the address of the repository's files at this version, when a release is built: with
README_FILES=https://HOST/PATH/ the README's pictures and links to files begin with it. Without it they are text alone.
"""

import os
import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

LAUNCH_SCRIPTS = ["launch_options.sh", "option_values.sh", "gpu_node.sh", "slurm.sh"]
"""Those that run wherever ringformer is installed. tpu_pod.sh sends the repository's HEAD to its hosts, and the others
set up or show the repository: they need a clone."""


class WithFolders(build_py):
    """Copies the folders into what is built. An editable package finds them in the clone; it is a plain path to it, or
    type checkers would not find the package."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for source in [*Path("configs").glob("*.py"), *(Path("scripts", name) for name in LAUNCH_SCRIPTS)]:
                target = Path(self.build_lib, "ringformer", source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


def index_page(readme: str, files: str) -> str:
    """The README with links that lead somewhere from an index page.

    Args:
      readme: in Markdown.
      files: the address of the repository's files, or "": links to them become their text.
    """
    to_file = r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)"
    base = files.rstrip("/")
    return re.sub(to_file, rf"\1[\2]({base}/\3)" if base else r"\2", readme)


setup(
    packages=find_packages(include=["ringformer", "ringformer.*"]),
    package_dir={"": "."},
    package_data={
        "ringformer": ["py.typed"],
        "ringformer.evals.texts": ["*.bz2"],
        "ringformer.hardware": ["chips.toml"],
        "ringformer.ops.kernels": ["chunk_tables/*.json"],
        "ringformer.train": ["config_keys.txt"],
    },
    cmdclass={"build_py": WithFolders},
    long_description=index_page(Path("README.md").read_text(encoding="utf-8"), os.environ.get("README_FILES", "")),
    long_description_content_type="text/markdown",
)
