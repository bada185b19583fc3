"""The first operation of a program that gives NaN or an infinity: the program run again, with every operation watched.

`jax.debug_nans` sees what a compiled program returns, and takes a `scan` for one operation; this looks into loops,
branches and recomputations, on every device of a `shard_map`. What each operation gives is reduced to a bit beside it,
so the watched program needs about the memory of the plain one. A kernel is one operation.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ringformer.ops.varying_axes import vary, varying_axes

INLINED = dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr") | dict.fromkeys(
    ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"
)
"""Operations that are a program of their own, and the parameter that holds it."""
OPENED = {"scan", "while", "cond"} | set(INLINED)
OF_LIBRARIES = ("/flax/", "/jaxtyping/", "/einops/", "/optax/")
NAN, INFINITY = KINDS = "NaN", "an infinity"
INFINITE_BY_DESIGN = "log", "log1p"
"""The logarithm of a softmax's sum that is empty."""
MOVES = set(
    """
    all_gather all_gather_invariant broadcast_in_dim concatenate copy copy_p device_put dynamic_slice
    dynamic_update_slice expand_dims name neg optimization_barrier pad pcast ppermute pvary reshape rev select_n
    slice split squeeze stop_gradient transpose
    """.split()  # noqa: SIM905
)
"""Operations that compute nothing: what they give, they were given."""


class Loop(NamedTuple):
    """A loop around an operation: where it stands, its number of turns if that is no data."""

    place: str
    length: int | None
    reverse: bool


class Operation(NamedTuple):
    """An operation of a program, as often as it is called from another place."""

    name: str
    place: str
    """File, line and function."""
    scope: str
    """Name scopes and transformations: "transpose" is in those of a backward pass."""
    loops: tuple[Loop, ...]
    path: tuple[int, ...]
    """Its place in the program, and how deep in which loops: with the turns, the order in time."""


class Finding(NamedTuple):
    """The first operation of a kind, on the device that was first."""

    kind: str
    operation: Operation
    turns: tuple[int, ...]
    """Turns of the loops around it, counted in time from 0."""
    device: int
    """Its number in the mesh."""

    def __str__(self):
        op, turns = self.operation, []
        for loop, turn in zip(op.loops, self.turns, strict=True):
            if loop.length != 1:
                index = loop.length - 1 - turn if loop.reverse and loop.length else turn
                turns.append(f"index {index}{f' of {loop.length}' if loop.length else ''} of the loop at {loop.place}")
        around = f"; {', '.join(turns)}" if turns else ""
        direction = "backward" if "transpose(" in op.scope else "forward"
        return f"{op.name} at {op.place} gives {self.kind} on device {self.device}, {direction}, in {op.scope}{around}"


def find_bad_operations(
    function: Callable, arguments: Sequence[Any], in_specs: Any, mesh: Mesh, **options
) -> list[Finding]:
    """Run `function(*arguments)` under `shard_map`, watched: in the order of time the first operation that gives NaN,
    and if one before it gave an infinity from finite numbers the first of these.

    `options` go to `jax.jit`. All processes get the same answer.
    """
    operations: dict[tuple[int, ...], int] = {}
    described: list[Operation] = []
    axes = tuple(mesh.axis_names)

    def watched(*arguments):
        closed = jax.make_jaxpr(function)(*arguments)
        watch = _Watch(operations, described, _depth(closed.jaxpr))
        _, firsts = watch.run(
            closed.jaxpr, closed.consts, jax.tree.leaves(arguments), vary(watch.nothing, axes), (), ()
        )
        rows = jnp.zeros((mesh.size, *firsts.shape), firsts.dtype)
        return lax.psum(rows.at[lax.axis_index(axes)].set(firsts), axes)

    program = jax.jit(jax.shard_map(watched, mesh=mesh, in_specs=in_specs, out_specs=P()), **options)
    firsts = np.asarray(jax.device_get(program(*arguments)))
    first = []
    for kind in range(len(KINDS)):
        seen = []
        for device, (number, *turns) in enumerate(firsts[:, kind].tolist()):
            if number:
                operation = described[number - 1]
                seen.append(Finding(KINDS[kind], operation, tuple(turns[: len(operation.loops)]), device))
        first += sorted(seen, key=_time)[:1]
    first.sort(key=_time)
    return first if not first or first[0].kind == INFINITY else first[:1]


def _time(finding: Finding) -> tuple[int, ...]:
    """A path has -1 where a turn of a loop is to stand."""
    turns = iter(finding.turns)
    return tuple(next(turns) if place < 0 else place for place in finding.operation.path)


class _Watch:
    """An interpreter of programs that carries along the first bad operations: int32 [2, 1 + depth], for NaN and for
    infinities the operation's number (0: none) and the turns of the loops around it."""

    def __init__(self, numbers, described, depth):
        self._numbers, self._described = numbers, described
        self.nothing = jnp.zeros((len(KINDS), 1 + depth), jnp.int32)

    def run(self, jaxpr: Jaxpr, consts, args, firsts, path, loops, turns=(), scope=""):
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        largest: dict[Any, jax.Array | None] = {}  # of each array's magnitudes

        def look(variables):
            for v in variables:
                if v not in largest:
                    largest[v] = _largest(env[v])
            return [largest[v] for v in variables if largest[v] is not None]

        for place, eqn in enumerate(jaxpr.eqns):
            here, inner_scope = (*path, place), "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
            values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            with eqn.ctx.manager:
                outs, firsts = self._operate(eqn, values, firsts, here, loops, turns, inner_scope)
            env |= zip(eqn.outvars, outs, strict=True)
            if eqn.primitive.name not in OPENED | MOVES and (given := look(eqn.outvars)):
                taken = look([v for v in eqn.invars if not isinstance(v, Literal)])
                number = self._number(eqn, here, loops, inner_scope)
                firsts = self._note(eqn.primitive.name, number, given, taken, firsts, turns)
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars], firsts

    def _operate(self, eqn, values, firsts, path, loops, turns, scope):
        name, p = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(eqn, values, firsts, path, loops, turns, scope)
        if name == "while":
            return self._while(eqn, values, firsts, path, loops, turns, scope)
        if name == "cond":
            index, *operands = values
            branches = [self._function(b, (*path, i), loops, turns, scope) for i, b in enumerate(p["branches"])]
            return lax.switch(index.astype(jnp.int32), branches, firsts, *operands)
        if name in INLINED:
            if p.get("differentiated") and p.get("prevent_cse"):
                values = _apart(values)
            inner = p[INLINED[name]]
            inner = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
            return self._function(inner, path, loops, turns, scope)(firsts, *values)
        outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(p))
        return outs if eqn.primitive.multiple_results else [outs], firsts

    def _function(self, closed: ClosedJaxpr, path, loops, turns, scope):
        """`function(firsts, *operands) -> (results, firsts)`."""
        return lambda firsts, *operands: self.run(
            closed.jaxpr, closed.consts, operands, firsts, path, loops, turns, scope
        )

    def _scan(self, eqn, values, firsts, path, loops, turns, scope):
        p = eqn.params
        consts, carry, xs = _scanned(p, values)
        carried_over = len(carry)
        loop, body = Loop(_place(eqn), p["length"], p["reverse"]), p["jaxpr"]

        def turn(carried, index_and_xs):
            firsts, number, carry = carried
            function = self._function(body, (*path, -1), (*loops, loop), (*turns, number), scope)
            outs, firsts = function(firsts, *consts, *carry, *index_and_xs)
            return (firsts, number + 1, outs[:carried_over]), outs[carried_over:]

        (firsts, _, carry), ys = lax.scan(
            turn, (firsts, jnp.int32(0), carry), xs, length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
        )
        return [*carry, *ys], firsts

    def _while(self, eqn, values, firsts, path, loops, turns, scope):
        p = eqn.params
        test_consts, consts, carry = _split(values, p["cond_nconsts"], p["body_nconsts"])
        loop, test = Loop(_place(eqn), None, False), p["cond_jaxpr"]

        def goes_on(carried):
            return jax.extend.core.jaxpr_as_fun(test)(*test_consts, *carried[2])[0]

        def turn(carried):
            firsts, number, carry = carried
            function = self._function(p["body_jaxpr"], (*path, -1), (*loops, loop), (*turns, number), scope)
            carry, firsts = function(firsts, *consts, *carry)
            return firsts, number + 1, carry

        firsts, _, carry = lax.while_loop(goes_on, turn, (firsts, jnp.int32(0), carry))
        return carry, firsts

    def _number(self, eqn, path, loops, scope) -> int:
        if path not in self._numbers:
            self._described.append(Operation(eqn.primitive.name, _place(eqn), scope, loops, path))
            self._numbers[path] = len(self._described)
        return self._numbers[path]

    def _note(self, name, number, given, taken, firsts, turns):
        """Return the first bad operations, with this one if it is the first of its kind."""
        bad = [_any(jnp.isnan, given), jnp.bool_(False)]
        if name not in INFINITE_BY_DESIGN:
            bad[1] = _any(jnp.isinf, given) & ~_any(jnp.isinf, taken)
        rest = [jnp.int32(0)] * (self.nothing.shape[1] - 1 - len(turns))
        first = jnp.stack(bad) & (firsts[:, 0] == 0)
        return jnp.where(first[:, None], jnp.stack([jnp.int32(number), *turns, *rest]), firsts)


def _any(test, scalars) -> jax.Array:
    return sum((test(x).astype(jnp.int32) for x in scalars), jnp.int32(0)) > 0


def _largest(x) -> jax.Array | None:
    """The largest magnitude, NaN if there is one; None of what are no floats on the device: what is kept in host memory
    is looked at where it comes from."""
    aval = jax.typeof(x)
    if not jnp.issubdtype(aval.dtype, jnp.floating) or aval.memory_space == jax.memory.Space.Host or not aval.size:
        return None
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def _apart(values: list) -> list:
    """Behind a barrier, lest a recomputation be merged with what it repeats; a barrier for each type of varying axes,
    since all that goes through one comes out as one type."""
    kinds = [varying_axes(x) for x in values]
    out = list(values)
    for kind in set(kinds):
        places = [i for i, k in enumerate(kinds) if k == kind]
        for i, x in zip(places, lax.optimization_barrier([values[i] for i in places]), strict=True):
            out[i] = x
    return out


def _scanned(params: dict[str, Any], values: list):
    """The constants of a scan, its first carry and what it goes along; JAX 0.12 has a tree for their numbers."""
    if "ft_in" in params:
        return [list(part) for part in params["ft_in"].update(values).unpack()]
    return _split(values, params["num_consts"], params["num_carry"])


def _split(values, *sizes):
    a, b = sizes
    return values[:a], values[a : a + b], values[a + b :]


def _depth(jaxpr: Jaxpr) -> int:
    """The most loops around any operation."""
    deepest = 0
    for eqn in jaxpr.eqns:
        inner = max((_depth(getattr(x, "jaxpr", x)) for x in _programs(eqn)), default=0)
        deepest = max(deepest, inner + (eqn.primitive.name in ("scan", "while")))
    return deepest


def _programs(eqn: JaxprEqn) -> list:
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, (tuple, list)) else (p,))]
    return [v for v in values if isinstance(v, (Jaxpr, ClosedJaxpr))]


def _place(eqn: JaxprEqn) -> str:
    """The innermost line of no library, below its package's folder."""
    frames = source_info_util.summarize(eqn.source_info, 20).splitlines()
    own = [frame for frame in frames if not any(library in frame for library in OF_LIBRARIES)]
    place = (own or frames or ["an unknown line"])[-1]
    return "ringformer/" + place.rsplit("/ringformer/", 1)[1] if "/ringformer/" in place else place
