"""The run-time check of signatures in the tests: `conftest.py` has every function of ops and of LLaMA go through it."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as type checkers have it


def check(function):
    """`function`, its arguments and result checked against its annotations.

    Not the dataclasses: theirs come from configs and command lines, and are checked by the package, for users too.
    """
    return function if function.__name__ == "__init__" else checked(function)
