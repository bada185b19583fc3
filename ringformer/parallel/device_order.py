"""Order of the devices in the mesh, in which every hop of every `sp` ring uses a single physical link.

TPU chips form a grid (v3, v5e, v6e: two dimensions; v4, v5p: three) with links between neighbours along each dimension.
Two ranks that exchange keys and values should be neighbours: a longer hop shares links with other hops, and the TPU
compiler makes it synchronous. So the slice is cut into equal boxes, one for each `sp` ring, and the ring follows a
Hamiltonian cycle of its box. Wrap-around links are not used, because not every slice has them.

If several devices are one rank of the ring (`ulysses`), each rank is a small box of its own, and the ring follows a
Hamiltonian cycle of these boxes. A device sends its keys to the device at the same place of the next box. Where the
boxes are s chips wide in the direction of the ring, these hops cross s links, which s hops share.

Several TPU slices are joined by the network between their hosts, which is slower by far than any link. They are the
outermost parts of dp: no ring, and nothing that shards weights or heads, crosses it.

GPUs of a node are all connected to each other; the network between nodes is slower. A ring of GPUs should leave a node
as rarely as possible. `tp`, which moves more bytes, should not leave it at all, nor should the devices of a rank. Where
a slower network still joins groups of nodes, such as racks, the groups are the outermost parts of dp: processes must be
numbered group by group.
"""

import itertools
import math
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np


def order_devices(devices: list[Any], shape: tuple[int, int, int, int], ulysses: int = 1) -> np.ndarray:
    """Arrange the devices in an array [dp, fsdp, tp, sp] of this shape, according to the links between them; each
    `ulysses` neighbours on sp are one rank of the ring.

    Warns if the rings cannot run between neighbours. Raises ValueError if `ulysses` does not divide sp, or several
    slices do not divide dp.
    """
    dp, fsdp, tp, sp = shape
    if sp % ulysses:
        raise ValueError(f"ulysses={ulysses} does not divide sp={sp}")
    slices = tpu_slices(devices)
    if len(slices) > 1:
        check_slices(dp, len(slices))
        of_slice = dp // len(slices), fsdp, tp, sp
        return np.concatenate([order_devices(in_slice, of_slice, ulysses) for in_slice in slices])
    grid = _grid(devices)
    if grid is None:
        # One node after the other; tp innermost, then sp.
        ordered = sorted(devices, key=lambda x: (x.process_index, x.id))
        return np.array(ordered, object).reshape(dp, fsdp, sp, tp).swapaxes(2, 3)
    boxes = cut_into_boxes(grid.shape, sp, tp, ulysses)
    ranks = sp // ulysses
    places = tuple(np.array(grid.shape) // boxes.rank)  # grid of the ranks
    if boxes.ring is None:
        warnings.warn(
            f"no order of a {'x'.join(map(str, grid.shape))} slice makes all consecutive ranks of a ring neighbours, "
            f"for sp={sp} and ulysses={ulysses}, so hops share links; sizes of sp without longer hops: "
            f"{_sizes_of_rings(grid.shape, ulysses)}",
            stacklevel=2,
        )
        # Each ring is a piece of one path through the slice. It runs out on every second place and back on the others:
        # hops of 2.
        pieces = np.array(_snake(places)).reshape(-1, ranks, grid.ndim)
        rings = np.concatenate([pieces[:, ::2], pieces[:, 1::2][:, ::-1]], axis=1)
    else:
        # Boxes are listed group by group, with neighbours in a group next to each other; the ring is the same in each
        # box.
        groups = np.array(list(np.ndindex(*np.array(places) // boxes.ring // boxes.group)))
        corners = (groups[:, None] * boxes.group + _snake(boxes.group)).reshape(-1, 1, grid.ndim)
        rings = corners * boxes.ring + np.array(hamiltonian_cycle(boxes.ring))
    chips = rings[:, :, None] * boxes.rank + list(np.ndindex(*boxes.rank))  # [ring, rank, member, dimension]
    return grid[tuple(np.moveaxis(chips, -1, 0))].reshape(shape)


def check_slices(dp: int, slices: int, slices_are: str = "slices") -> None:
    """Raise ValueError if the slices, or groups of GPUs (`slices_are`), do not divide dp."""
    if dp % slices:
        raise ValueError(
            f"dp={dp} is not a multiple of the {slices} {slices_are}, each of which has whole rings and whole copies "
            f"of the weights: begin mesh_dim with a multiple of {slices}"
        )


def tpu_slices(devices: list[Any]) -> list[list[Any]]:
    """Return the devices by the TPU slice that they are in; one list of all of them if they are no TPUs."""
    if not all(hasattr(x, "coords") for x in devices):
        return [devices]
    of_slices: dict[int, list[Any]] = {}
    for device in devices:
        of_slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    return [of_slices[index] for index in sorted(of_slices)]


class Boxes(NamedTuple):
    """Sides of the boxes into which a slice is cut."""

    rank: tuple[int, ...]
    """Devices of one rank."""
    ring: tuple[int, ...] | None
    """Ranks of one ring; None if no box of them has a cycle."""
    group: tuple[int, ...]
    """Rings of one tp group; a single one if groups do not tile the slice."""


def cut_into_boxes(grid: tuple[int, ...], sp: int, tp: int, ulysses: int) -> Boxes:
    """Choose boxes in which rings join neighbours, with short hops, compact ranks, and the ranks of a tp group close
    together."""
    one = (1,) * len(grid)
    candidates = []
    ranks = _tiles(grid, ulysses)
    for rank in ranks:
        rest = _divided(grid, rank)
        for ring in _tiles(rest, sp // ulysses):
            if hamiltonian_cycle(ring) is None:
                continue
            for group in _tiles(_divided(rest, ring), tp) or [one]:
                candidates.append(Boxes(rank, ring, group))

    def cost(boxes):
        rank, ring, group = boxes
        hop = _longest_step(rank, ring)
        sides = tuple(np.multiply(rank, ring).tolist())
        step = _longest_step(sides, group)
        # An exchange of heads sends the bytes of two hops (MHA) to five (four queries a key head), and its busiest link
        # carries a quarter of a side's share of them.
        return (math.prod(ring) - 1) * hop + max(rank), group == one, step, max(sides), rank, ring, group

    return min(candidates, key=cost, default=Boxes(min(ranks, key=max), None, one))


def _longest_step(sides: tuple[int, ...], counts: tuple[int, ...]) -> int:
    """Return the longest way from one of these boxes to the next, in a grid of so many of them; 0 for a single one."""
    longest = 0
    for side, count in zip(sides, counts, strict=True):
        if count > 1:
            longest = max(longest, side)
    return longest


def _divided(grid: tuple[int, ...], box: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.floor_divide(grid, box).tolist())


def _tiles(grid: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Return the boxes of `size` places that tile a grid."""
    divisors = map(_divisors, grid)
    return [box for box in itertools.product(*divisors) if math.prod(box) == size]


def _divisors(n: int) -> list[int]:
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]


def hamiltonian_cycle(box: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """Return a closed path through all places of a grid without wrap links, in which each step leads to a neighbour;
    None if there is none.

    A path exists if the number of places is even and they are not all on a line, or if there are two places.
    """
    size = math.prod(box)
    if size <= 2:
        return list(np.ndindex(*box))
    if size % 2 or sum(n > 1 for n in box) < 2:
        return None
    # Rows are one dimension of even size; columns are a snake through the others. The path alternates along the rows
    # through all columns except the first, which leads back to the start.
    first = next(i for i, n in enumerate(box) if n % 2 == 0)
    rows = box[first]
    back, *columns = _snake(box[:first] + box[first + 1 :])
    walk = _back_and_forth(rows, columns)
    for row in reversed(range(rows)):
        walk.append((row, back))
    return [(*column[:first], row, *column[first:]) for row, column in walk]


def link_hops(ring: list[Any]) -> list[int]:
    """Count the links that each hop of a closed ring of TPU devices crosses, without wrap links."""
    places = np.array([place(x)[:-1] for x in ring])  # the cores of a chip are at the same place
    return np.abs(np.roll(places, -1, axis=0) - places).sum(axis=1).tolist()


def max_link_hops(mesh: jax.sharding.Mesh, ulysses: int = 1) -> int | None:
    """Return the longest hop of any ring of the mesh, in links; None except on TPUs. Each `ulysses` neighbours on `sp`
    are one rank."""
    slices = len(tpu_slices(list(mesh.devices.flat)))
    one_slice = mesh.devices[: len(mesh.devices) // slices]  # dp is the first axis, and the slices are alike
    devices = np.moveaxis(one_slice, mesh.axis_names.index("sp"), -1)
    if _grid(list(devices.flat)) is None:
        return None
    rings = devices.reshape(-1, devices.shape[-1] // ulysses, ulysses).swapaxes(1, 2)
    return max(max(link_hops(list(ring))) for ring in rings.reshape(-1, rings.shape[-1]))


def place(device: Any) -> tuple[int, ...]:
    """Return (x, y, z, core) of a TPU core. Two cores of a chip that are separate devices have no link between them."""
    return (*device.coords, device.core_on_chip)


def _grid(devices: list[Any]) -> np.ndarray | None:
    """Arrange the devices by place, keeping dimensions of size one; None if they do not fill a grid."""
    if not all(hasattr(x, "coords") and hasattr(x, "core_on_chip") for x in devices):
        return None
    places = np.array([place(x) for x in devices])
    low = places.min(axis=0)
    extent = np.ptp(places, axis=0) + 1
    if not math.prod(extent) == len(devices) == len(np.unique(places, axis=0)):
        return None
    grid = np.empty(tuple(extent), object)
    grid[tuple((places - low).T)] = devices
    return grid


def _snake(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """List all places of a grid along one path of neighbours that reverses its direction from line to line."""
    if not shape:
        return [()]
    rows, *others = shape
    return [(row, *column) for row, column in _back_and_forth(rows, _snake(tuple(others)))]


def _back_and_forth(rows: int, columns: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """List all pairs of a row and a column, row by row; every second row has its columns in reverse."""
    pairs = []
    for row in range(rows):
        ordered = reversed(columns) if row % 2 else columns
        for column in ordered:
            pairs.append((row, column))
    return pairs


def _sizes_of_rings(grid: tuple[int, ...], ulysses: int) -> str:
    sizes = []
    for ranks in range(2, math.prod(grid) // ulysses + 1, 2):
        sp = ranks * ulysses
        if cut_into_boxes(grid, sp, 1, ulysses).ring:
            sizes.append(str(sp))
    return ", ".join(sizes) or "none"
