"""Parser of compiled programs: their instructions, in order, and how often each one runs.

XLA prints the body of a loop once. Its instructions run as often as the loop's trip count. Compilers either state the
trip count (`known_trip_count`) or leave it to be derived: counters start at one constant and stop below another. A loop
whose trip count depends on data (chunk pairs with segment ids) has its upper bound in its name, `at_most_N_trips`.

In a scheduled module, instructions are executed in the order of the text.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ringformer.ops.kernels import cudnn_calls

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


class Array(NamedTuple):
    """The type of an array, without its layout."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the array; 0 for types without data, such as XLA's tokens."""
        bits = re.search(r"\d+", self.dtype)
        each = int(bits[0]) // 8 if bits else int(self.dtype == "pred")
        return each * math.prod(self.shape)


def parse_type(type_: str) -> list[tuple[Array, str]]:
    """Return the arrays of a type, each with its layout."""
    arrays = []
    for dtype, dims, layout in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\](?:\{([^{}]*)\})?", type_):
        arrays.append((Array(dtype, _numbers(dims)), layout))
    return arrays


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a text, such as "8,128"."""
    return tuple(map(int, re.findall(r"\d+", text)))


class Instruction(NamedTuple):
    """An instruction of a compiled module, parsed from its line."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    text: str
    is_root: bool

    @property
    def arrays(self) -> list[Array]:
        """Array or arrays of its result."""
        return [array for array, _ in parse_type(self.type)]

    @property
    def op_name(self) -> str:
        """Scopes and primitive that it was traced from, as a path; empty if the compiler added the instruction."""
        return (self.search(r'op_name="((?:[^"\\]|\\.)*)"') or "").replace("\\'", "'")

    @property
    def called(self) -> list[str]:
        """Computations that it runs, except a loop's condition."""
        names = re.findall(r"\b(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", self.text)
        for branches in re.findall(r"branch_computations=\{([^}]*)\}", self.text):
            names += re.findall(r"%?([\w.\-]+)", branches)
        return names

    @property
    def collective(self) -> str | None:
        """Kind of collective that the instruction starts; None if it starts none."""
        opcode = self.opcode
        if opcode in ("async-start", "async-update", "async-done"):
            return None  # the collective is in the computation that it calls
        for kind in COLLECTIVES:
            if opcode.startswith(kind) and not opcode.endswith("-done"):
                return kind
        return None

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of devices of a collective, or the pairs (source, target) of a permute; empty: one group of all."""
        return _groups(self.search(r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\[\S+)") or "")

    @property
    def bytes(self) -> int:
        """Bytes of its result, in any memory."""
        return sum(array.bytes for array in self.arrays)

    def search(self, pattern: str) -> str | None:
        """Return the first group of a pattern in the text; None if the text lacks it."""
        match = re.search(pattern, self.text)
        return match[1] if match else None

    def stated(self, pattern: str) -> str:
        """Return the first group of a pattern in the text; raises ValueError if the text lacks it."""
        if (group := self.search(pattern)) is not None:
            return group
        raise ValueError(f"this compiler's text has no {pattern}: {self.text.strip()[:200]}")


@lru_cache
def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse groups, listed as in {{0,1},{2,3}}, or as an array of numbers that is cut into rows: [2,2]<=[2,2]T(1,0)."""
    if cut := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        rows, sides, order = map(_numbers, cut.groups(""))
        numbers = np.arange(math.prod(sides)).reshape(sides).transpose(order or None).reshape(rows)
        return tuple(map(tuple, numbers.tolist()))
    return tuple(map(_numbers, re.findall(r"\{([\d,]+)\}", text)))


class KernelCost(NamedTuple):
    """Cost of one run of a Pallas kernel, as stated by the kernel."""

    flops: float
    hbm_bytes: float


def kernel_cost(instruction: Instruction) -> KernelCost | None:
    """Return the cost estimate that a kernel states; None if it states none."""
    estimate = instruction.search(r'"cost_estimate":\{([^}]*)\}') or ""
    numbers = dict(re.findall(r'"(\w+)":"(\d+)"', estimate))
    if "flops" not in numbers:
        return None
    return KernelCost(float(numbers["flops"]), float(numbers["bytes_accessed"]))


@dataclass(frozen=True)
class Program:
    """Computations of a compiled module: their instructions by name, in order."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    _flops: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> "Program":
        computations: dict[str, dict[str, Instruction]] = {}
        entry = None
        current = None
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if header:
                current = computations[header[2]] = {}
                if header[1]:
                    entry = header[2]
                continue
            match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$", line)
            if match and current is not None:
                root, name, type_, opcode, rest = match.groups()
                operands = re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0])
                current[name] = Instruction(name, type_, opcode, operands, line, bool(root))
        if entry is None:
            raise ValueError("the text is not a compiled program: it has no ENTRY computation")
        return Program(computations, entry)

    @property
    def executed_instructions(self) -> Iterator[tuple[str, Instruction, float]]:
        """Yield every executed instruction, except those inside fusions, as (computation, instruction, number of
        runs)."""
        for name, times in self.executed.items():
            for instruction in self.computations[name].values():
                yield name, instruction, times

    def root(self, computation: str) -> Instruction:
        """Return the instruction whose value is the computation's result."""
        return next(i for i in self.computations[computation].values() if i.is_root)

    def parameters(self, computation: str) -> dict[int, str]:
        """Return the names of a computation's parameters by their numbers."""
        names = {}
        for instruction in self.computations[computation].values():
            if instruction.opcode == "parameter":
                number = int(instruction.stated(r"parameter\((\d+)\)"))
                names[number] = instruction.name
        return names

    @cached_property
    def executed(self) -> dict[str, float]:
        """Number of runs of each computation, except those of fusions; every branch counts as taken."""
        counts: dict[str, float] = {}

        def visit(name, times):
            counts[name] = counts.get(name, 0) + times
            for instruction in self.computations[name].values():
                if instruction.opcode in ("while", "conditional", "call", "async-start"):
                    runs = times * self._repetitions(name, instruction)
                    for called in instruction.called:
                        visit(called, runs)

        visit(self.entry, 1)
        return counts

    def flops(self, name: str) -> float:
        """Return the matrix multiplication FLOPs of one run of a computation; a conditional counts as its cheapest
        branch."""
        if name not in self._flops:
            self._flops[name] = sum(self.instruction_flops(name, i) for i in self.computations[name].values())
        return self._flops[name]

    def instruction_flops(self, computation: str, instruction: Instruction) -> float:
        """Matrix multiplication FLOPs of one instruction, including everything that it calls."""
        opcode = instruction.opcode
        here = self.computations[computation]
        if opcode == "convolution":
            return _convolution_flops(here, instruction)
        if opcode == "dot":
            return _product_flops(here, instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
        if opcode == "custom-call":
            if cost := kernel_cost(instruction):
                return cost.flops
            if "__cublas" in instruction.text:
                return _product_flops(here, instruction, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
            if cudnn_calls.FORWARD in instruction.text:
                return _attention_flops(here, instruction)
        if not instruction.called or opcode in ("reduce", "sort", "scatter", "all-reduce", "map"):
            return 0.0
        inside = list(map(self.flops, instruction.called))
        if opcode == "conditional":
            return min(inside)
        return sum(inside) * self._repetitions(computation, instruction)

    def _repetitions(self, computation: str, instruction: Instruction) -> int:
        """Return how often an instruction runs each computation that it calls."""
        if instruction.opcode == "while":
            return self.trip_count(computation, instruction)
        return 1

    def trip_count(self, computation: str, loop: Instruction) -> int:
        """Return how often a loop runs its body: an upper bound if this depends on data, 1 if nothing is known."""
        exact = loop.search(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')
        named = re.search(r"at_most_(\d+)_trips/while$", loop.op_name)
        if trips := exact or (named and named[1]):
            return int(trips)
        name = loop.stated(r"condition=%?([\w.\-]+)")
        condition = self.computations[name]
        root = self.root(name)
        if root.opcode != "compare" or "direction=LT" not in root.text:
            return 1
        counter, limit = root.operands
        if condition[counter].opcode != "get-tuple-element":
            return 1
        index = int(condition[counter].stated(r"index=(\d+)"))
        here = self.computations[computation]
        carry = here[loop.operands[0]]
        if not carry.operands:
            return 1
        start = _constant(here, carry.operands[index])
        end = _constant(condition, limit)
        if start is None or end is None:
            return 1
        return end - start


def _constant(computation: dict[str, Instruction], name: str) -> int | None:
    """Return the constant that an instruction holds, possibly through copies; None if it is not a constant."""
    instruction = computation[name]
    while instruction.opcode in ("copy", "bitcast", "convert", "copy-start", "copy-done"):
        instruction = computation[instruction.operands[0]]
    number = instruction.search(r"constant\((-?\d+)\)")
    if instruction.opcode == "constant" and number:
        return int(number)
    return None


def _operand_shapes(computation: dict[str, Instruction], instruction: Instruction) -> list[tuple[int, ...]]:
    """Return the shapes of the first two operands of an instruction."""
    return [computation[name].arrays[0].shape for name in instruction.operands[:2]]


def _product_flops(computation: dict[str, Instruction], product: Instruction, contracted_dims: str) -> float:
    """FLOPs of a matrix product; `contracted_dims` is a pattern of the contracted dimensions of its left operand."""
    contracted = _numbers(product.stated(contracted_dims))
    lhs = computation[product.operands[0]].arrays[0].shape
    return 2.0 * math.prod(product.arrays[0].shape) * math.prod(lhs[i] for i in contracted)


def _attention_flops(computation: dict[str, Instruction], call: Instruction) -> float:
    """Return the FLOPs of a call of cuDNN's attention: two products forward or five backward; under a causal mask, half
    of each product, and within a window, at most so many keys of each query."""
    (B, T, H, d), (_, S, _, _) = _operand_shapes(computation, call)
    products = 5 if cudnn_calls.BACKWARD in call.text else 2
    pairs = float(T * S)
    if re.search(r'"mask_type":\s*"CAUSAL"', call.text):
        pairs /= 2
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', call.text)
    if window and 0 < int(window[1]) < T:
        pairs = int(window[1]) * (T - int(window[1]) / 2)
    return 2.0 * products * B * H * pairs * d


WINDOW = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
"""Usual values of a convolution's window, for each spatial dimension."""


def _convolution_flops(computation: dict[str, Instruction], convolution: Instruction) -> float:
    """FLOPs of a convolution. The TPU compiler writes every matmul as a convolution, with batch dimensions as dilated
    or padded windows. So this counts the pairs of an output and a kernel position that meet an element of the input."""
    lhs_dims, rhs_dims, out_dims = re.split("_|->", convolution.stated(r"dim_labels=(\w+_\w+->\w+)"))
    lhs, rhs = _operand_shapes(computation, convolution)
    lhs_size = dict(zip(lhs_dims, lhs, strict=True))
    rhs_size = dict(zip(rhs_dims, rhs, strict=True))
    out_size = dict(zip(out_dims, convolution.arrays[0].shape, strict=True))
    window = dict(re.findall(r"(\w+)=([\w\-]+)", convolution.search(r"window=\{([^}]*)\}") or ""))
    pairs = 1.0
    for i, dim in enumerate(sorted(filter(str.isdigit, out_size))):
        stride, padding, lhs_dilate, rhs_dilate = (_of_window(window, key, i) for key in WINDOW)
        place = np.arange(out_size[dim])[:, None] * stride - padding + np.arange(rhs_size[dim]) * rhs_dilate
        pairs *= ((place >= 0) & (place % lhs_dilate == 0) & (place < lhs_size[dim] * lhs_dilate)).sum()
    return 2.0 * float(pairs) * out_size["b"] * out_size["f"] * rhs_size["i"]


def _of_window(window: dict[str, str], key: str, dim: int) -> int:
    """Return what a window states for a dimension, such as the second stride of 1x2, or else the usual value."""
    if key not in window:
        return WINDOW[key]
    return int(window[key].split("x")[dim].split("_")[0])
