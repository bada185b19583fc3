"""Python imports this when it starts, if the folder is on PYTHONPATH: the mutated file in a test's own processes."""

import json
import os

from replaced_file import VARIABLE, replace_file

if VARIABLE in os.environ:
    with open(os.environ[VARIABLE]) as file:
        replaced = json.load(file)
    replace_file(replaced["path"], replaced["text"])
