"""Have Python's loader read another text instead of a source file. Imports the standard library alone."""

import importlib.machinery
import importlib.util
import sys

VARIABLE = "RINGFORMER_REPLACED_FILE"
"""Environment variable with the path of a JSON file: {"path": the source file, "text": what is read instead}."""


def replace_file(path: str, text: str) -> None:
    """Read `text` where the source file `path` is imported. It must not have been imported before.

    The loader's class is patched, since import hooks (jaxtyping's) have loaders of their own that inherit from it. The
    compiled file in __pycache__ is of the true text: it is never read, and none is written.
    """
    sys.dont_write_bytecode = True
    compiled = importlib.util.cache_from_source(path)
    read = importlib.machinery.SourceFileLoader.get_data

    def get_data(self, wanted):
        if wanted == path:
            return text.encode()
        if wanted == compiled:
            raise OSError(f"{compiled} is of another text")
        return read(self, wanted)

    importlib.machinery.SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
