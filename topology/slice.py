"""A slice as a value: its chips, devices and hosts, and the numbers that name them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tpu_dist.topology.coordinates import Coord, Device, HostId, Rank, Shape
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import Generation, Wrap, find_generation
from tpu_dist.topology.shapes import CUBE, check_shape, format_for

Wraps = tuple[bool, bool, bool]

_TWISTED = "_twisted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Chips of one generation, joined by ICI to a mesh or torus.

    Ranks go row-major over (x, y, z, core), cores fastest: in that order libtpu 0.0.42 compiles
    collectives over the whole slice to all of its links. Hosts, and the devices of one host, are
    numbered as libtpu numbers its processes: x fastest.

    Attributes:
        generation: of all its chips.
        shape: chips along x, y and z.
        wrap: which axes are closed to rings.
        chips_per_host: how many chips a host holds.
        twisted: whether the wrap-around of the short axes is shifted along the long ones.

    Example:
        >>> slice_ = Slice.parse("tpu7x:4x4x8")
        >>> slice_.num_chips, slice_.num_devices, slice_.num_hosts
        (128, 256, 32)
        >>> slice_.rank_of(Coord(0, 0, 1), core=1)
        3
    """

    generation: Generation
    shape: Shape
    wrap: Wraps = (False, False, False)
    chips_per_host: int
    twisted: bool = False

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise ValueError(f"a slice has at least one chip along each axis, got {self.shape}")
        if self.twisted and not can_twist(self.generation, self.shape):
            raise TopologyError(
                f"{self.generation}:{format_for(self.generation, self.shape)} cannot be twisted: "
                f"only v4 and v5p slices of k x k x 2k or k x 2k x 2k chips in whole cubes can. "
                f"Leave {_TWISTED} out."
            )
        if not self.host_grid.fits_into(self.shape):
            raise TopologyError(
                f"{self.generation}:{format_for(self.generation, self.shape)} cannot be made of "
                f"hosts with {self.chips_per_host} chips, which stand "
                f"{format_for(self.generation, self.host_grid)}. Give another chips_per_host."
            )

    @classmethod
    def parse(cls, text: str, *, chips_per_host: int | None = None) -> Slice:
        """Read a slice's name: a generation and a shape, as in ``tpu7x:4x4x8``.

        Args:
            text: the name; a suffix ``_twisted`` is understood where the generation can be.
            chips_per_host: where hosts of several kinds exist (v5e, v6e); default: those that
                Google Cloud makes such slices of.

        Raises:
            TopologyError: no such generation or shape; names the nearest shapes.
        """
        match = re.fullmatch(
            r"\s*([^:]{1,40}):(\d{1,6}(?:x\d{1,6}){1,2})(_twisted|_untwisted)?\s*",
            text.lower(),
            re.ASCII,
        )
        if match is None:
            raise TopologyError(
                f"{text!r} names no slice: give generation and shape, as in tpu7x:4x4x8 or "
                f"v6e:16x16, or an accelerator type, as in v5p-128."
            )
        generation = find_generation(match[1])
        axes = [int(axis) for axis in match[2].split("x")]
        if len(axes) != generation.num_axes and not (len(axes) == 3 and axes[2] == 1):
            raise TopologyError(
                f"{text!r} has {len(axes)} axes; a {generation} slice has {generation.num_axes}."
            )
        return cls.of(
            generation,
            Shape(*axes),
            chips_per_host=chips_per_host,
            twisted=match[3] == _TWISTED,
        )

    @classmethod
    def of(
        cls,
        generation: Generation,
        shape: Shape,
        *,
        chips_per_host: int | None = None,
        twisted: bool = False,
    ) -> Slice:
        """Return the slice of that shape, wrapped as its generation is.

        The chips of less than a whole host, as a container may be given them, are a slice too.

        Raises:
            TopologyError: there is no such shape.
        """
        if shape not in generation.host_grids.values():
            check_shape(generation, shape)
        usual = cls.with_usual_links(generation, shape, chips_per_host=chips_per_host)
        return replace(usual, twisted=twisted)

    @classmethod
    def with_usual_links(
        cls, generation: Generation, shape: Shape, *, chips_per_host: int | None = None
    ) -> Slice:
        """Return a slice that exists, of whichever shape: wrapped as its generation is.

        Raises:
            TopologyError: it cannot be made of such hosts.
        """
        return cls(
            generation=generation,
            shape=shape,
            wrap=_WRAPS[generation.wrap](generation, shape),
            chips_per_host=chips_per_host or _usual_chips_per_host(generation, shape),
        )

    def __str__(self) -> str:
        name = f"{self.generation}:{format_for(self.generation, self.shape)}"
        return name + _TWISTED if self.twisted else name

    @property
    def num_chips(self) -> int:
        """Chips in the slice."""
        return self.shape.volume

    @property
    def num_devices(self) -> int:
        """Devices in the slice: as many processes drive it."""
        return self.num_chips * self.generation.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """Hosts of the slice."""
        return self.host_bounds.volume

    @property
    def devices_per_host(self) -> int:
        """Devices, and processes, of one host."""
        return self.chips_per_host * self.generation.devices_per_chip

    @property
    def host_grid(self) -> Shape:
        """How the chips of one host stand."""
        return self.generation.host_grid(self.chips_per_host)

    @property
    def host_bounds(self) -> Shape:
        """How the hosts stand: TPU_HOST_BOUNDS."""
        return self.shape.divided_by(self.host_grid)

    def __contains__(self, coord: Coord) -> bool:
        return all(0 <= at < extent for at, extent in zip(coord, self.shape, strict=True))

    def coords(self) -> Iterator[Coord]:
        """Yield every chip, in the order of ranks."""
        for x in range(self.shape.x):
            for y in range(self.shape.y):
                for z in range(self.shape.z):
                    yield Coord(x, y, z)

    def rank_of(self, coord: Coord, core: int = 0) -> Rank:
        """Return a device's rank in the slice.

        Raises:
            TopologyError: the slice has no such device.
        """
        if coord not in self or not 0 <= core < self.generation.devices_per_chip:
            raise TopologyError(
                f"{self} has no device at {coord} core {core}; its chips go up to "
                f"{Coord(*(extent - 1 for extent in self.shape))}, with "
                f"{self.generation.devices_per_chip} device(s) each."
            )
        chip = (coord.x * self.shape.y + coord.y) * self.shape.z + coord.z
        return Rank(chip * self.generation.devices_per_chip + core)

    def device_at(self, rank: int) -> Device:
        """Return the device with that rank in the slice; the inverse of rank_of.

        Raises:
            TopologyError: the slice has no such rank.
        """
        if not 0 <= rank < self.num_devices:
            raise TopologyError(f"{self} has {self.num_devices} devices, and none of rank {rank}.")
        chip, core = divmod(rank, self.generation.devices_per_chip)
        xy, z = divmod(chip, self.shape.z)
        x, y = divmod(xy, self.shape.y)
        return Device(0, Coord(x, y, z), core)

    def host_of(self, coord: Coord) -> HostId:
        """Return the host that holds a chip."""
        grid, bounds = self.host_grid, self.host_bounds
        x, y, z = (at // extent for at, extent in zip(coord, grid, strict=True))
        return HostId((z * bounds.y + y) * bounds.x + x)

    def chips_of(self, host: int) -> tuple[Coord, ...]:
        """Return a host's chips, in the order in which the host numbers them.

        Raises:
            TopologyError: the slice has no such host.
        """
        bounds, grid = self.host_bounds, self.host_grid
        if not 0 <= host < self.num_hosts:
            raise TopologyError(f"{self} has {self.num_hosts} hosts, and none numbered {host}.")
        z, xy = divmod(host, bounds.x * bounds.y)
        y, x = divmod(xy, bounds.x)
        return tuple(
            Coord(x * grid.x + i, y * grid.y + j, z * grid.z + k)
            for k in range(grid.z)
            for j in range(grid.y)
            for i in range(grid.x)
        )

    def devices_of(self, host: int) -> tuple[Device, ...]:
        """Return a host's devices by local rank."""
        cores = range(self.generation.devices_per_chip)
        return tuple(Device(0, coord, core) for coord in self.chips_of(host) for core in cores)


def can_twist(generation: Generation, shape: Shape) -> bool:
    """Whether the shape can be a twisted torus: k x k x 2k or k x 2k x 2k, in whole cubes.

    Source: cloud.google.com/tpu/docs/v4, "Twisted tori topologies".
    """
    short, middle, long = sorted(shape)
    is_cubes = all(extent % CUBE == 0 for extent in shape)
    return generation.can_twist and is_cubes and long == 2 * short and middle in (short, long)


def _usual_chips_per_host(generation: Generation, shape: Shape) -> int:
    """Up to one host's grid the slice is one host; larger ones are made of 4-chip hosts."""
    for num_chips, grid in generation.host_grids.items():
        if grid == shape:
            return num_chips
    return generation.chips_per_host


def _wrap_cubes(generation: Generation, shape: Shape) -> Wraps:
    whole = all(extent % CUBE == 0 for extent in shape)
    return (whole, whole, whole)


def _wrap_full_axes(generation: Generation, shape: Shape) -> Wraps:
    return (shape.x == generation.pod.x, shape.y == generation.pod.y, False)


_WRAPS: Mapping[Wrap, Callable[[Generation, Shape], Wraps]] = {
    Wrap.CUBES: _wrap_cubes,
    Wrap.FULL_AXIS: _wrap_full_axes,
}
