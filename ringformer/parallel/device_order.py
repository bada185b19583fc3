"""Order of the devices in the mesh, in which every hop of every `sp` ring uses a single physical link.

TPU chips form a grid (v3, v5e, v6e: two dimensions; v4, v5p: three) with links between neighbours along each dimension.
Two ranks that exchange keys and values should be neighbours: a longer hop shares links with other hops, and the TPU
compiler makes it synchronous. So the slice is cut into equal boxes, one for each `sp` ring, and the ring follows a
Hamiltonian cycle of its box. Wrap-around links are not used, because not every slice has them.

GPUs of a node are all connected to each other; the network between nodes is slower. A ring of GPUs should leave a node
as rarely as possible. `tp`, which moves more bytes, should not leave it at all.
"""

import itertools
import math
import warnings

import jax
import numpy as np


def order_devices(devices: list, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Arrange the devices in an array [dp, fsdp, tp, sp] of this shape, according to the links between them.

    Warns if the rings cannot run on single links.
    """
    dp, fsdp, tp, sp = shape
    grid = _grid(devices)
    if grid is None:
        # One node after the other; tp innermost, then sp.
        ordered = sorted(devices, key=lambda x: (x.process_index, x.id))
        return np.array(ordered, object).reshape(dp, fsdp, sp, tp).swapaxes(2, 3)
    box, group = _boxes(grid.shape, sp, tp)
    if box is None:
        warnings.warn(
            f"no order of a {'x'.join(map(str, grid.shape))} slice puts rings of sp={sp} on single links, so hops "
            f"share links; sizes of sp without shared links: {_sizes_of_rings(grid.shape)}",
            stacklevel=2,
        )
        # Each ring is a piece of one path through the slice. It runs out on every second place and back on the others:
        # hops of 2.
        pieces = np.array(_snake(grid.shape)).reshape(-1, sp, grid.ndim)
        rings = np.concatenate([pieces[:, ::2], pieces[:, 1::2][:, ::-1]], axis=1)
    else:
        # Boxes are listed group by group, with neighbours in a group next to each other; the ring is the same in each
        # box.
        groups = np.array(list(np.ndindex(*np.array(grid.shape) // box // group)))
        corners = (groups[:, None] * group + _snake(group)).reshape(-1, 1, grid.ndim)
        rings = corners * box + np.array(hamiltonian_cycle(box))
    return grid[tuple(np.moveaxis(rings, -1, 0))].reshape(shape)


def _boxes(grid: tuple[int, ...], sp: int, tp: int) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Choose the box of a ring, measured in chips, and the box of a tp group, measured in ring boxes; (None, ...) if no
    box has a cycle.

    In every candidate, ring hops are single links; the chosen one keeps the ranks of a tp group close together.
    """
    rings = [box for box in _tiles(grid, sp) if hamiltonian_cycle(box) is not None]
    pairs = [
        (box, group) for box in rings for group in _tiles(tuple(n // b for n, b in zip(grid, box, strict=True)), tp)
    ]

    def cost(pair):
        box, group = pair
        step = max((b for b, g in zip(box, group, strict=True) if g > 1), default=0)
        return step, max(box), box, group

    one = (1,) * len(grid)  # tp groups that do not tile the slice get no box
    return min(pairs, key=cost, default=(min(rings, key=max) if rings else None, one))


def _tiles(grid: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Return the boxes of `size` places that tile a grid."""
    divisors = [[b for b in range(1, n + 1) if n % b == 0] for n in grid]
    return [box for box in itertools.product(*divisors) if math.prod(box) == size]


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
    rows, columns = box[first], _snake(box[:first] + box[first + 1 :])
    walk = [(r, c) for r in range(rows) for c in columns[1:][:: -1 if r % 2 else 1]]
    walk += [(r, columns[0]) for r in reversed(range(rows))]
    return [(*column[:first], r, *column[first:]) for r, column in walk]


def link_hops(ring: list) -> list[int]:
    """Count the links that each hop of a closed ring of TPU devices crosses, without wrap links."""
    places = np.array([place(x)[:-1] for x in ring])  # the cores of a chip are at the same place
    return np.abs(np.roll(places, -1, axis=0) - places).sum(axis=1).tolist()


def max_link_hops(mesh: jax.sharding.Mesh) -> int | None:
    """Return the longest hop of any `sp` ring of the mesh, in links; None except on TPUs."""
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index("sp"), -1)
    if _grid(list(devices.flat)) is None:
        return None
    return max(max(link_hops(list(ring))) for ring in devices.reshape(-1, devices.shape[-1]))


def place(device) -> tuple[int, ...]:
    """Return (x, y, z, core) of a TPU core. Two cores of a chip that are separate devices have no link between them."""
    return (*device.coords, device.core_on_chip)


def _grid(devices: list) -> np.ndarray | None:
    """Arrange the devices by place, keeping dimensions of size one; None if they do not fill a grid."""
    if not all(hasattr(x, "coords") and hasattr(x, "core_on_chip") for x in devices):
        return None
    places = np.array([place(x) for x in devices])
    low, extent = places.min(axis=0), np.ptp(places, axis=0) + 1
    if not math.prod(extent) == len(devices) == len(np.unique(places, axis=0)):
        return None
    grid = np.empty(tuple(extent), object)
    grid[tuple((places - low).T)] = devices
    return grid


def _snake(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """List all places of a grid along one path of neighbours that reverses its direction from line to line."""
    if not shape:
        return [()]
    rest = _snake(shape[1:])
    return [(r, *c) for r in range(shape[0]) for c in rest[:: -1 if r % 2 else 1]]


def _sizes_of_rings(grid: tuple[int, ...]) -> str:
    sizes = [n for n in range(2, math.prod(grid) + 1, 2) if _boxes(grid, n, 1)[0]]
    return ", ".join(map(str, sizes)) or "none"
