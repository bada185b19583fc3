"""Search for the first operation of a program that gives NaN or an infinity, by running the program with every
operation watched.

`jax.debug_nans` checks only the results of a compiled program, and treats a `scan` as one operation. This search looks
into loops, branches and recomputations, on every device of a `shard_map`. It reduces the result of each operation to
one bit, so the watched program needs about as much memory as the original one. A kernel counts as one operation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ringformer.ops.varying_axes import vary, varying_axes

INLINED = dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr") | dict.fromkeys(
    ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"
)
"""Operations that call a program, and the parameter that holds the program."""
OPENED = {"scan", "while", "cond", *INLINED}
"""Operations that are not watched themselves; the operations inside them are."""
OF_LIBRARIES = ("/flax/", "/jaxtyping/", "/einops/", "/optax/")
"""Folders of libraries, whose lines are skipped when an operation is located."""
NAN, INFINITY = KINDS = "NaN", "an infinity"
INFINITE_BY_DESIGN = "log", "log1p"
"""Operations that may give an infinity. For example, the logarithm of a softmax's sum is -inf for a row that sees
nothing."""
MOVES = set(
    """
    all_gather all_gather_invariant broadcast_in_dim concatenate copy copy_p device_put dynamic_slice
    dynamic_update_slice expand_dims name neg optimization_barrier pad pcast ppermute pvary reshape rev select_n
    slice split squeeze stop_gradient transpose
    """.split()  # noqa: SIM905
)
"""Operations that move numbers without computing any."""
DEEPEST = 16
"""Largest number of nested loops around an operation whose turns are recorded."""


class Loop(NamedTuple):
    """A loop around an operation."""

    place: str
    """File, line and function."""
    length: int | None
    """Number of turns; None if it depends on data."""
    reverse: bool


class Position(NamedTuple):
    """Position in the program while it is interpreted."""

    path: tuple[int, ...] = ()
    """Index of each enclosing operation in its program, with -1 in place of a loop's turn."""
    loops: tuple[Loop, ...] = ()
    """Loops around the position, outermost first."""
    turns: tuple[jax.Array, ...] = ()
    """Turn of each of these loops, counted in time from 0."""
    scope: str = ""
    """Name scopes and transformations; those of a backward pass contain "transpose"."""

    def inside(self, loop: Loop, turn: jax.Array) -> "Position":
        """Return the position inside a turn of a loop."""
        return self._replace(path=(*self.path, -1), loops=(*self.loops, loop), turns=(*self.turns, turn))


class Operation(NamedTuple):
    """An operation of a program. If a function is called from two places, each of its operations occurs twice."""

    number: int
    """Number from 1, in the order of tracing."""
    name: str
    place: str
    """File, line and function."""
    scope: str
    """`Position.scope`."""
    loops: tuple[Loop, ...]
    """`Position.loops`."""
    path: tuple[int, ...]
    """`Position.path`; with the turns of the loops filled in, paths are ordered by time."""


class Finding(NamedTuple):
    """The first operation that gave one kind of bad number, on the device where it happened first."""

    kind: str
    operation: Operation
    turns: tuple[int, ...]
    """Turns of the loops around the operation, counted in time from 0."""
    device: int
    """Index of the device in the flattened mesh."""

    def time(self) -> tuple[int, ...]:
        """Return the key that orders findings by time: the operation's path with the turns filled in."""
        turns = iter(self.turns)
        key = []
        for index in self.operation.path:
            key.append(next(turns, 0) if index < 0 else index)
        return tuple(key)

    def __str__(self) -> str:
        op = self.operation
        turns = []
        for loop, turn in zip(op.loops, self.turns, strict=False):
            if loop.length is None:
                turns.append(f"index {turn} of the loop at {loop.place}")
            elif loop.length != 1:
                index = loop.length - 1 - turn if loop.reverse else turn
                turns.append(f"index {index} of {loop.length} of the loop at {loop.place}")
        around = f"; {', '.join(turns)}" if turns else ""
        direction = "backward" if "transpose(" in op.scope else "forward"
        return f"{op.name} at {op.place} gives {self.kind} on device {self.device}, {direction}, in {op.scope}{around}"


def find_bad_operations(
    function: Callable[..., Any], arguments: Sequence[Any], in_specs: Any, mesh: Mesh, **options: Any
) -> list[Finding]:
    """Run `function(*arguments)` under `shard_map`, watched, and return the first operation in time that gave NaN.

    If an earlier operation gave an infinity from finite numbers, the first such operation precedes it in the list. The
    list is empty if all numbers are finite. All processes get the same result.

    Args:
      options: more options of `jax.jit`.
    """
    watch = _Watch()
    axes = mesh.axis_names

    def watched(*arguments):
        program = jax.make_jaxpr(function)(*arguments)
        nothing = vary(jnp.zeros((len(KINDS), 1 + DEEPEST), jnp.int32), axes)
        firsts, _ = watch.run(Position(), program, nothing, *jax.tree.leaves(arguments))
        rows = jnp.zeros((mesh.size, *firsts.shape), firsts.dtype)
        return lax.psum(rows.at[lax.axis_index(axes)].set(firsts), axes)

    program = jax.jit(jax.shard_map(watched, mesh=mesh, in_specs=in_specs, out_specs=P()), **options)
    firsts = np.asarray(jax.device_get(program(*arguments)))
    operations = list(watch.operations.values())
    first = []
    for kind, rows in zip(KINDS, firsts.swapaxes(0, 1).tolist(), strict=True):
        seen = []
        for device, (number, *turns) in enumerate(rows):
            if number:
                operation = operations[number - 1]
                seen.append(Finding(kind, operation, tuple(turns[: len(operation.loops)]), device))
        first += sorted(seen, key=Finding.time)[:1]
    first.sort(key=Finding.time)
    if first and first[0].kind != INFINITY:
        return first[:1]
    return first


class _Watch:
    """Interpreter of programs that records the first bad operations in an array `firsts`, int32 [2, 1 + DEEPEST].

    `firsts` has one row for NaN and one for infinities. Each holds the number of the operation (0: none so far) and the
    turns of the loops around it.
    """

    def __init__(self) -> None:
        self.operations: dict[tuple[int, ...], Operation] = {}
        """Operations by their path."""

    def run(self, at: Position, program: ClosedJaxpr, firsts: jax.Array, *arguments) -> tuple[jax.Array, list[Any]]:
        """Run a program at a position; return the updated `firsts` and the results."""
        jaxpr = program.jaxpr
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *arguments), strict=True))

        def read(variables):
            return [v.val if isinstance(v, Literal) else env[v] for v in variables]

        for index, eqn in enumerate(jaxpr.eqns):
            scope = "/".join(filter(None, (at.scope, str(eqn.source_info.name_stack))))
            here = at._replace(path=(*at.path, index), scope=scope)
            with eqn.ctx.manager:
                firsts, results = self._operate(here, eqn, firsts, read(eqn.invars))
            env |= zip(eqn.outvars, results, strict=True)
            if eqn.primitive.name not in OPENED | MOVES:
                variables = [v for v in eqn.invars if not isinstance(v, Literal)]
                taken = read(variables)
                firsts = self._note(here, eqn, firsts, taken, results)
        return firsts, read(jaxpr.outvars)

    def _operate(self, at: Position, eqn: JaxprEqn, firsts, values):
        name = eqn.primitive.name
        p = eqn.params
        if name == "scan":
            return self._scan(at, eqn, firsts, values)
        if name == "while":
            return self._while(at, eqn, firsts, values)
        if name == "cond":
            index, *operands = values
            branches = []
            for i, branch in enumerate(p["branches"]):
                inside = at._replace(path=(*at.path, i))
                branches.append(partial(self.run, inside, branch))
            return lax.switch(index.astype(jnp.int32), branches, firsts, *operands)
        if name in INLINED:
            if p.get("differentiated") and p.get("prevent_cse"):
                values = _apart(values)
            inner = p[INLINED[name]]
            if not isinstance(inner, ClosedJaxpr):
                inner = ClosedJaxpr(inner, ())
            return self.run(at, inner, firsts, *values)
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(p))
        if not eqn.primitive.multiple_results:
            results = [results]
        return firsts, results

    def _scan(self, at: Position, eqn: JaxprEqn, firsts, values):
        p = eqn.params
        if "ft_in" in p:  # JAX 0.12 has a tree instead of numbers of values
            consts, carry, xs = map(list, p["ft_in"].update(values).unpack())
        else:
            consts, carry, xs = _split(values, p["num_consts"], p["num_carry"])
        loop = Loop(_place(eqn), p["length"], p["reverse"])
        carried_over = len(carry)

        def turn(carried, x):
            firsts, number, carry = carried
            firsts, results = self.run(at.inside(loop, number), p["jaxpr"], firsts, *consts, *carry, *x)
            return (firsts, number + 1, results[:carried_over]), results[carried_over:]

        options = {name: p[name] for name in ("length", "reverse", "unroll")}
        (firsts, _, carry), ys = lax.scan(turn, (firsts, jnp.int32(0), carry), xs, **options)
        return firsts, [*carry, *ys]

    def _while(self, at: Position, eqn: JaxprEqn, firsts, values):
        p = eqn.params
        test_consts, consts, carry = _split(values, p["cond_nconsts"], p["body_nconsts"])
        loop = Loop(_place(eqn), None, False)

        def goes_on(carried):
            return jaxpr_as_fun(p["cond_jaxpr"])(*test_consts, *carried[2])[0]

        def turn(carried):
            firsts, number, carry = carried
            firsts, carry = self.run(at.inside(loop, number), p["body_jaxpr"], firsts, *consts, *carry)
            return firsts, number + 1, carry

        firsts, _, carry = lax.while_loop(goes_on, turn, (firsts, jnp.int32(0), carry))
        return firsts, carry

    def _note(self, at: Position, eqn: JaxprEqn, firsts, taken, given):
        """Return `firsts`, in which this operation is entered for each kind of bad number that it is the first to
        give."""
        largest = _largest(given)
        if not largest:
            return firsts
        name = eqn.primitive.name
        operation = Operation(len(self.operations) + 1, name, _place(eqn), at.scope, at.loops, at.path)
        number = self.operations.setdefault(at.path, operation).number
        bad = [_any(jnp.isnan, largest), jnp.bool_(False)]
        if name not in INFINITE_BY_DESIGN:
            bad[1] = _any(jnp.isinf, largest) & ~_any(jnp.isinf, _largest(taken))
        first = jnp.stack(bad) & (firsts[:, 0] == 0)
        row = [jnp.int32(number), *at.turns, *[jnp.int32(0)] * DEEPEST][: 1 + DEEPEST]
        return jnp.where(first[:, None], jnp.stack(row), firsts)


def _any(test: Callable[..., Any], numbers: list[jax.Array]) -> jax.Array:
    return sum((test(x).astype(jnp.int32) for x in numbers), jnp.int32(0)) > 0


def _largest(values: list[Any]) -> list[jax.Array]:
    """Return the largest magnitude in each array of floats on the device; NaN if the array has a NaN.

    Arrays in host memory are left out, because they are checked where they are computed.
    """
    largest = []
    for x in values:
        t = jax.typeof(x)
        if jnp.issubdtype(t.dtype, jnp.floating) and t.memory_space != jax.memory.Space.Host and t.size:
            largest.append(jnp.max(jnp.abs(x)).astype(jnp.float32))
    return largest


def _apart(values: list[Any]) -> list[Any]:
    """Put values behind a barrier, so that XLA does not merge a recomputation with the computation that it repeats.

    Values with the same varying axes share a barrier, because all results of a barrier vary over the same axes.
    """
    out = list(values)
    indices_of: dict[frozenset[Any], list[int]] = {}
    for i, x in enumerate(values):
        indices_of.setdefault(varying_axes(x), []).append(i)
    for indices in indices_of.values():
        apart = lax.optimization_barrier([values[i] for i in indices])
        for i, x in zip(indices, apart, strict=True):
            out[i] = x
    return out


def _split(values: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return values[:first], values[first : first + second], values[first + second :]


def _place(eqn: JaxprEqn) -> str:
    """Return the innermost line outside of libraries, with its path from the package's folder on."""
    frames = source_info_util.summarize(eqn.source_info, 20).splitlines()
    own = []
    for frame in frames:
        if not any(library in frame for library in OF_LIBRARIES):
            own.append(frame)
    place = (own or frames or ["an unknown line"])[-1]
    if "/ringformer/" not in place:
        return place
    return "ringformer/" + place.rsplit("/ringformer/", 1)[1]
