"""What pyproject.toml cannot say: configs/ and the launch scripts go into the wheel as folders of the package."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

LAUNCH_SCRIPTS = ["launch_options.sh", "gpu_node.sh", "slurm.sh"]
"""Those that run wherever ringformer is installed. tpu_pod.sh sends the repository's HEAD to its hosts, and the others
set up or show the repository: they need a clone."""


class WithoutScriptModules(build_py):
    """Leaves the Python files of scripts/ out: they belong to scripts that need a clone."""

    def find_package_modules(self, package, package_dir):
        return [] if package == "ringformer.scripts" else super().find_package_modules(package, package_dir)


setup(
    packages=[*find_packages(include=["ringformer", "ringformer.*"]), "ringformer.configs", "ringformer.scripts"],
    package_dir={"ringformer.configs": "configs", "ringformer.scripts": "scripts"},
    package_data={
        "ringformer": ["py.typed"],
        "ringformer.ops.kernels": ["chunk_tables/*.json"],
        "ringformer.scripts": LAUNCH_SCRIPTS,
    },
    cmdclass={"build_py": WithoutScriptModules},
)
