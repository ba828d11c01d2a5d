"""The generations of TPUs: what a chip has, how hosts hold chips, which way they are cabled.

Sources, by the letters of the table's comments:

(a) cloud.google.com/tpu/docs, the page of each generation: peak FLOP/s, HBM, pod sizes, topologies.
    Of DCN, a chip: v5p, v6e and tpu7x; v5e's is that of a pod over its chips; v4's is (c)'s.
(b) Norrie et al., "The Design Process for Google's Training Chips: TPUv2 and TPUv3", IEEE Micro
    41(2), 2021: links of 496 and 656 Gbit/s a direction, HBM of both.
(c) jax-ml.github.io/scaling-book: one-way bandwidth of a link of v4, v5e, v5p and v6e.
(d) Devices a chip and chips a host: tpu-info's device.py, jax's hardware_utils.py, and the
    descriptions that libtpu 0.0.42 gives of `tpu7x:2x2x1` and the others.
(f) libtpu 0.0.42 compiles programs of a part of a v5e slice for 2x2 and 2x4; for 8x8 it refuses
    them ("limited ICI routing"), and for 4x4, and some on v6e, the compiler ends its process.
(e) Assumed: the published 1,200 GB/s of a tpu7x chip, both ways over 6 links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tpu_dist.topology.coordinates import Shape
from tpu_dist.topology.errors import TopologyError

GIB = 2**30
GB = 10**9
TERA = 10**12


class Wrap(Enum):
    """When an axis of a slice is closed to a ring."""

    CUBES = "all three, where the slice consists of whole 4x4x4 cubes"
    FULL_AXIS = "an axis as long as the pod's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What is the same for all chips of one generation.

    Attributes:
        name: as in the names of topologies (``tpu7x:4x4x8``).
        aliases: other names that people and tools use, in lower case.
        num_axes: of the torus: 2 or 3.
        devices_per_chip: how many devices one chip is for a program.
        cores_per_chip_in_names: what an accelerator type counts: v5p-128 is 64 chips.
        host_grids: how the chips of one host stand, by their number; the less than whole hosts are
            what a container may be given.
        chips_per_host: of the hosts that larger slices are made of.
        wrap: when an axis is a ring.
        pod: the shape of the whole pod; for three axes the largest that may be asked for.
        limited_routing: whether programs on more chips than one host has must span the whole slice.
        can_twist: whether k x k x 2k and k x 2k x 2k may be cabled as a twisted torus.
        num_links: ICI links of a chip.
        link_bandwidth: of one link, one way, bytes/s.
        dcn_bandwidth: of a chip's share of the data-centre network, one way, bytes/s; None where
            slices are not joined.
        hbm_bytes: of a chip.
        hbm_bandwidth: of a chip, bytes/s.
        peak_bf16_flops: of a chip, FLOP/s.
        peak_fp8_flops: of a chip, FLOP/s; None where it has no fp8 units.
        gke_accelerator: value of the node label cloud.google.com/gke-tpu-accelerator.
    """

    name: str
    aliases: tuple[str, ...] = ()
    num_axes: int
    devices_per_chip: int
    cores_per_chip_in_names: int
    host_grids: Mapping[int, Shape] = field(hash=False)
    chips_per_host: int = 4
    wrap: Wrap
    pod: Shape
    limited_routing: bool = False
    can_twist: bool = False
    num_links: int
    link_bandwidth: float
    dcn_bandwidth: float | None = None
    hbm_bytes: int
    hbm_bandwidth: float
    peak_bf16_flops: float
    peak_fp8_flops: float | None = None
    gke_accelerator: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def ici_bandwidth(self) -> float:
        """Of one chip, all links both ways, bytes/s: the figure that is published."""
        return 2 * self.num_links * self.link_bandwidth

    def host_grid(self, num_chips: int) -> Shape:
        """Return how `num_chips` chips of one host stand.

        Raises:
            TopologyError: no host has that many; lists those there are.
        """
        try:
            return self.host_grids[num_chips]
        except KeyError:
            known = ", ".join(map(str, sorted(self.host_grids)))
            raise TopologyError(
                f"a {self.name} host with {num_chips} chips is not known; known are {known} chips. "
                f"Look whether the container was given all of them, or hide the odd ones."
            ) from None


_TRAY = Shape(2, 2, 1)
# 1 and 2 of 4 chips: jax's test_multiprocess.py. 8 chips of v5e and v6e are 2x4, not 4x2: the same.
_CUBE_HOSTS: Mapping[int, Shape] = {1: Shape(1, 1, 1), 2: Shape(1, 2, 1), 4: _TRAY}
_FLAT_HOSTS: Mapping[int, Shape] = {**_CUBE_HOSTS, 8: Shape(2, 4, 1)}

_GENERATIONS = (
    Generation(
        name="v2",  # (a) (b)
        num_axes=2,
        devices_per_chip=2,
        cores_per_chip_in_names=2,
        host_grids=_CUBE_HOSTS,
        wrap=Wrap.FULL_AXIS,
        pod=Shape(16, 16),
        num_links=4,
        link_bandwidth=62 * GB,
        hbm_bytes=16 * GIB,
        hbm_bandwidth=700 * GB,
        peak_bf16_flops=46 * TERA,
    ),
    Generation(
        name="v3",  # (a) (b)
        num_axes=2,
        devices_per_chip=2,
        cores_per_chip_in_names=2,
        host_grids=_CUBE_HOSTS,
        wrap=Wrap.FULL_AXIS,
        pod=Shape(32, 32),
        num_links=4,
        link_bandwidth=82 * GB,
        hbm_bytes=32 * GIB,
        hbm_bandwidth=900 * GB,
        peak_bf16_flops=123 * TERA,
        gke_accelerator="tpu-v3-slice",
    ),
    Generation(
        name="v4",  # (a) (c)
        aliases=("v4p",),
        num_axes=3,
        devices_per_chip=1,
        cores_per_chip_in_names=2,
        host_grids=_CUBE_HOSTS,
        wrap=Wrap.CUBES,
        pod=Shape(16, 16, 16),
        can_twist=True,
        num_links=6,
        link_bandwidth=45 * GB,
        dcn_bandwidth=6.25 * GB,
        hbm_bytes=32 * GIB,
        hbm_bandwidth=1_200 * GB,
        peak_bf16_flops=275 * TERA,
        gke_accelerator="tpu-v4-podslice",
    ),
    Generation(
        name="v5e",  # (a) (c) (f)
        aliases=("v5litepod", "v5lite", "v5 lite"),
        num_axes=2,
        devices_per_chip=1,
        cores_per_chip_in_names=1,
        host_grids=_FLAT_HOSTS,
        wrap=Wrap.FULL_AXIS,
        limited_routing=True,
        pod=Shape(16, 16),
        num_links=4,
        link_bandwidth=45 * GB,
        dcn_bandwidth=3.125 * GB,
        hbm_bytes=16 * GIB,
        hbm_bandwidth=819 * GB,
        peak_bf16_flops=197 * TERA,
        gke_accelerator="tpu-v5-lite-podslice",
    ),
    Generation(
        name="v5p",  # (a) (c)
        aliases=("v5",),
        num_axes=3,
        devices_per_chip=1,
        cores_per_chip_in_names=2,
        host_grids=_CUBE_HOSTS,
        wrap=Wrap.CUBES,
        pod=Shape(16, 20, 28),
        can_twist=True,
        num_links=6,
        link_bandwidth=90 * GB,
        dcn_bandwidth=6.25 * GB,
        hbm_bytes=95 * GIB,
        hbm_bandwidth=2_765 * GB,
        peak_bf16_flops=459 * TERA,
        gke_accelerator="tpu-v5p-slice",
    ),
    Generation(
        name="v6e",  # (a) (c) (f)
        aliases=("v6lite", "v6 lite", "trillium"),
        num_axes=2,
        devices_per_chip=1,
        cores_per_chip_in_names=1,
        host_grids=_FLAT_HOSTS,
        wrap=Wrap.FULL_AXIS,
        limited_routing=True,
        pod=Shape(16, 16),
        num_links=4,
        link_bandwidth=90 * GB,
        dcn_bandwidth=12.5 * GB,
        hbm_bytes=32 * GIB,
        hbm_bandwidth=1_640 * GB,
        peak_bf16_flops=918 * TERA,
        gke_accelerator="tpu-v6e-slice",
    ),
    Generation(
        name="tpu7x",  # (a) (d) (e)
        aliases=("v7x", "7x", "ironwood"),
        num_axes=3,
        devices_per_chip=2,
        cores_per_chip_in_names=2,
        host_grids=_CUBE_HOSTS,
        wrap=Wrap.CUBES,
        pod=Shape(16, 24, 24),
        num_links=6,
        link_bandwidth=100 * GB,
        dcn_bandwidth=12.5 * GB,
        hbm_bytes=192 * GIB,
        hbm_bandwidth=7_380 * GB,
        peak_bf16_flops=2_307 * TERA,
        peak_fp8_flops=4_614 * TERA,
        gke_accelerator="tpu7x",
    ),
)

GENERATIONS: Mapping[str, Generation] = {each.name: each for each in _GENERATIONS}

_BY_ANY_NAME: Mapping[str, Generation] = {
    name: each
    for each in _GENERATIONS
    for name in (each.name, *each.aliases, each.gke_accelerator)
    if name is not None
}


def find_generation(name: str) -> Generation:
    """Return the generation that people, accelerator types or GKE's labels call `name`.

    Raises:
        TopologyError: none is called so; lists those there are.

    Example:
        >>> find_generation("v5litepod").name
        'v5e'
    """
    cleaned = name.strip().lower().removeprefix("tpu ")
    found = _BY_ANY_NAME.get(cleaned) or _BY_ANY_NAME.get(cleaned.removeprefix("tpu-"))
    if found is None:
        raise TopologyError(
            f"{name!r} is no TPU generation; known are {', '.join(GENERATIONS)} (and names such as "
            f"v5litepod, and GKE's accelerator labels)."
        )
    return found
