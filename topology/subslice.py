"""A block of a slice: what a group of ranks, or a job on a part of the slice, has."""

from __future__ import annotations

from dataclasses import dataclass

from tpu_dist.topology.coordinates import Coord, Rank, Shape, format_shape
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.slice import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class SubSlice:
    """A block of chips of a slice.

    Attributes:
        parent: the slice that it is a part of.
        origin: its chip nearest to (0, 0, 0).
        shape: its extent.

    Example:
        >>> half = SubSlice(parent=Slice.parse("v5p:4x4x4"), origin=Coord(2, 0, 0),
        ...                 shape=Shape(2, 4, 4))
        >>> half.slice().wrap
        (False, True, True)
    """

    parent: Slice
    origin: Coord
    shape: Shape

    def __post_init__(self) -> None:
        end = Coord(*(at + n - 1 for at, n in zip(self.origin, self.shape, strict=True)))
        if min(self.shape) < 1 or self.origin not in self.parent or end not in self.parent:
            raise TopologyError(
                f"a block of {format_shape(self.shape)} chips at {self.origin} does not lie in "
                f"{self.parent}. Move it, or make it smaller."
            )

    def __contains__(self, coord: Coord) -> bool:
        return all(
            start <= at < start + extent
            for start, at, extent in zip(self.origin, coord, self.shape, strict=True)
        )

    def slice(self) -> Slice:
        """Return the block as a slice of its own: an axis is a ring only where it is whole.

        Raises:
            TopologyError: it cuts through hosts. Its chips and ranks can be asked for all the same.
        """
        grid = self.parent.host_grid
        if any(at % extent for at, extent in zip(self.origin, grid, strict=True)):
            raise TopologyError(
                f"the block of {format_shape(self.shape)} chips at {self.origin} of {self.parent} "
                f"cuts through hosts, which hold {format_shape(grid)} chips. Move it."
            )
        x, y, z = (
            wrap and extent == whole
            for wrap, extent, whole in zip(
                self.parent.wrap, self.shape, self.parent.shape, strict=True
            )
        )
        return Slice(
            generation=self.parent.generation,
            shape=self.shape,
            wrap=(x, y, z),
            chips_per_host=self.parent.chips_per_host,
            twisted=self.parent.twisted and self.shape == self.parent.shape,
        )

    def coords(self) -> tuple[Coord, ...]:
        """Return its chips in the parent's coordinates, in the order of ranks."""
        ox, oy, oz = self.origin
        return tuple(
            Coord(ox + x, oy + y, oz + z)
            for x in range(self.shape.x)
            for y in range(self.shape.y)
            for z in range(self.shape.z)
        )

    def ranks(self) -> tuple[Rank, ...]:
        """Return the parent's ranks of its devices, ascending."""
        cores = range(self.parent.generation.devices_per_chip)
        return tuple(self.parent.rank_of(coord, core) for coord in self.coords() for core in cores)
