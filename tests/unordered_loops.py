"""Find loops of collectives in a compiled CPU program that another collective may overtake.

XLA:CPU begins the collectives of a computation one after the other, in the order of the text. A loop counts as begun
when it has started. So a later collective can begin while the loop runs, unless it, or one between them, needs the
loop's result. If both have one channel, devices take each other's messages (`ringformer/ops/simulated_devices.py`).

pytest's `--unordered-loops` looks into every program that the tests of its process compile, and fails the tests that
compile such a loop.
"""

import re
from functools import cache
from typing import NamedTuple

import pytest

from ringformer.estimate.compiled.program_text import Instruction, Program

CALLS = ("while", "conditional", "call")
"""Instructions that run other computations, and may go on after they count as begun."""


class Overtaking(NamedTuple):
    """A loop, and a later collective that may begin while the loop runs."""

    computation: str
    loop: Instruction
    collective: Instruction


def unordered_loops(text: str) -> list[Overtaking]:
    """Return the pairs of a loop and a collective, or another loop, that may run at once on one channel."""
    program = Program.parse(text)

    @cache
    def channels(computation: str, name: str) -> frozenset[tuple[str, str]]:
        """Kinds of collectives that an instruction runs, each with its channel."""
        instruction = program.computations[computation][name]
        if instruction.collective:
            return frozenset({(instruction.collective, instruction.search(r"channel_id=(\d+)") or "")})
        found: frozenset[tuple[str, str]] = frozenset()
        if instruction.opcode in CALLS:
            for called in instruction.called:
                for inner in program.computations[called]:
                    found |= channels(called, inner)
        return found

    pairs = []
    for computation in program.executed:
        here = program.computations[computation]
        needed = _needed(here)
        communicating = [name for name in here if channels(computation, name)]
        for place, loop in enumerate(communicating):
            if here[loop].opcode not in CALLS:
                continue
            for later in communicating[place + 1 :]:
                if loop in needed[later]:
                    break  # this one waits for the loop, and the following ones begin after it
                if channels(computation, loop) & channels(computation, later):
                    pairs.append(Overtaking(computation, here[loop], here[later]))
    return pairs


def _needed(instructions: dict[str, Instruction]) -> dict[str, set[str]]:
    """Names of all instructions that must end before each instruction begins."""
    needed: dict[str, set[str]] = {}
    for name, instruction in instructions.items():
        controls = instruction.search(r"control-predecessors=\{([^}]*)\}") or ""
        direct = [*instruction.operands, *re.findall(r"%?([\w.\-]+)", controls)]
        needed[name] = set()
        for other in direct:
            if other in needed:
                needed[name] |= needed[other] | {other}
    return needed


def pytest_addoption(parser):
    parser.addoption("--unordered-loops", action="store_true", help="fail tests that compile loops without an order")


def pytest_configure(config):
    config.addinivalue_line("markers", "unordered: the test compiles such a loop on purpose")
    if config.getoption("unordered_loops"):
        config.pluginmanager.register(_EveryProgram(), "every program")


class _EveryProgram:
    """Looks into every program of several devices that this process compiles."""

    def __init__(self):
        from jax._src import compiler

        self.found: list[Overtaking] = []
        compile_and_load = compiler.backend_compile_and_load

        def compile_and_look(*args, **kwargs):
            executable = compile_and_load(*args, **kwargs)
            for module in executable.hlo_modules():
                text = module.to_string()
                if "collective-permute" in text:
                    self.found += unordered_loops(text)
            return executable

        compiler.backend_compile_and_load = compile_and_look

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.found.clear()
        result = yield
        if item.get_closest_marker("unordered"):
            return result
        pairs = [f"{pair.loop.op_name} -> {pair.collective.op_name}" for pair in self.found]
        assert not pairs, pairs
        return result
