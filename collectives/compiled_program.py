"""Reads from a compiled TPU program which collectives it runs, on which groups, by which algorithm.

The text is that of libtpu 0.0.42: optimised HLO, where each instruction carries a JSON object,
``backend_config``, in which the compiler writes how it moves the data:

- ``collective_offload_config``: on the SparseCore. ``color_strategies`` are the ways that a payload
  is split over ("colours"), each a list of ``phase_rings``, one for each axis of the torus; a phase
  between the devices of one chip has the dim D2D.
- ``collective_algorithm_config``: on the TensorCore. The names of an emitter and a strategy, and
  ``colors:`` and ``phases:`` in a debug string. A colour of the strategies called UniDirection...
  goes one way around its rings, of the others both: that is counted as two here. On a fusion, it is
  for the collective in the computation that the fusion calls.

What crosses from slice to slice is a transfer to the host, which names the collective it is a part
of. Groups are numbered within a slice: all slices do the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_dist.topology.errors import TpuDistError

# What the emitters that name no colours do: (colours, phases). Each axis has a colour a direction.
_EMITTERS: Mapping[str, tuple[int, int]] = {
    "1DAllGather": (2, 1),
    "2DAllGather": (4, 2),
    "3DAllGather": (6, 3),
    "RingSumEmitter": (2, 1),
}
_UNKNOWN = (1, 1)  # the least that any algorithm does

_ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
}

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_INSTRUCTION = re.compile(
    rf"^\s*(?:ROOT )?%?\S+ = (?P<shape>.+?) (?P<kind>{_KINDS})(?P<start>-start)?\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{\s*$")
_FUSION = re.compile(r"^\s*(?:ROOT )?%?\S+ = (?P<shape>.+?) fusion\(.*\bcalls=%?(?P<calls>[\w.-]+)")
_SCATTER_FUSION = "AllReduceScatterFusion"  # an all-reduce and a slice that are done as one
# What a slice receives of the others. The target names the slices: "{1,2}x{0:15}", or each device,
# {{100000,100001,200000,200001}}: the slice's number goes before five digits.
_FROM_SLICES = re.compile(
    r"= \((?P<shape>[^()]*(?:\([^()]*\)[^()]*)*), u32\[\].*\) recv\("
    r'.*_xla_megascale_target=(?P<target>\S+),_xla_megascale_transfer_type="(?P<kind>\w+)"'
)
_DEVICES_OF_A_SLICE = 100_000
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollective:
    """One collective of a compiled program.

    Attributes:
        kind: as in HLO: ``all-gather``.
        result_bytes: of its result on one device.
        groups: the members of each group, as places in the program's list of devices; empty for
            one group of all.
        algorithm: the compiler's name for how it is done.
        colours: ways that the payload is split over.
        phases: rings over ICI that each way goes through, one after the other.
        num_slices: that it joins over DCN; 1 where it is within a slice.
    """

    kind: str
    result_bytes: int
    groups: tuple[tuple[int, ...], ...]
    algorithm: str
    colours: int
    phases: int
    num_slices: int = 1


def read_program(text: str) -> tuple[CompiledCollective, ...]:
    """Return the collectives of a compiled program, in the order of the text.

    Raises:
        TpuDistError: the text is not written as libtpu 0.0.42 writes it.
    """
    return tuple(_read_all(text))


def _read_all(text: str) -> Iterator[CompiledCollective]:
    configs = _configs_of_fusions(text)
    within = ""
    for line in text.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            within = opened[1]
        arrival = _FROM_SLICES.search(line)
        if arrival:
            yield _between_slices(arrival)
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        kind, shape = match["kind"], match["shape"]
        config = _backend_config(line)
        if within in configs:
            fusion_shape, config = configs[within]
            if _SCATTER_FUSION in str(config):
                kind, shape = "reduce-scatter", fusion_shape
        algorithm, colours, phases = _algorithm(config)
        yield CompiledCollective(
            kind=kind,
            result_bytes=_result_bytes(shape, is_start=bool(match["start"])),
            groups=_groups(match["rest"]),
            algorithm=algorithm,
            colours=colours,
            phases=phases,
        )


def _between_slices(arrival: re.Match[str]) -> CompiledCollective:
    return CompiledCollective(
        kind=arrival["kind"].lower().replace("_", "-"),
        result_bytes=_result_bytes(arrival["shape"], is_start=False),
        groups=(),
        algorithm="over DCN",
        colours=1,
        phases=1,
        num_slices=_num_slices(arrival["target"]),
    )


def _num_slices(target: str) -> int:
    first = target.strip('"').lstrip("{").partition("}")[0]
    if target.startswith("{{"):
        return len({number // _DEVICES_OF_A_SLICE for number in _numbers(first)})
    ranges = (part.partition(":") for part in first.split(","))  # 3, or 0:3 for four
    return sum(int(last or start) - int(start) + 1 for start, _, last in ranges)


def _configs_of_fusions(text: str) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return result and config of each fusion that is a collective, by its computation's name."""
    found = {}
    for line in text.splitlines():
        match = _FUSION.match(line)
        if match and "collective_algorithm_config" in line:
            found[match["calls"]] = (match["shape"], _backend_config(line))
    return found


def _backend_config(line: str) -> Mapping[str, Any]:
    at = line.find("backend_config={")
    if at < 0:
        return {}
    try:
        config, _ = json.JSONDecoder().raw_decode(line[at + len("backend_config=") :])
    except json.JSONDecodeError as error:
        raise TpuDistError(
            f"the compiled program cannot be read: {error} in {line[at : at + 200]!r}. It is "
            f"written by another compiler than libtpu 0.0.42; install tpu-dist[tpu]."
        ) from None
    return dict(config)


def _algorithm(config: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the algorithm's name, its colours and its phases over ICI."""
    strategies = _find(config.get("collective_offload_config"), "color_strategies")
    if strategies:
        rings = [strategy.get("phase_rings", []) for strategy in strategies]
        dims = [[_dim(ring) for ring in each] for each in rings]
        over_ici = [[dim for dim in each if dim != "D2D"] for each in dims]
        name = "sparsecore " + ("/".join(dims[0]) if any(dims[0]) else "ring")
        return name, len(strategies), max(1, *(len(each) for each in over_ici))
    chosen = config.get("collective_algorithm_config")
    if not chosen:
        return "not named", *_UNKNOWN
    emitter = str(chosen.get("emitter", ""))
    debug = str(chosen.get("debug", ""))
    colours, phases = (re.search(rf"\b{word}:(\d+)", debug) for word in ("colors", "phases"))
    name = "/".join(filter(None, (emitter, chosen.get("strategy"))))
    if colours and phases:
        ways = 1 if "UniDirection" in str(chosen.get("strategy")) else 2
        return name, ways * int(colours[1]), int(phases[1])
    known = next((found for start, found in _EMITTERS.items() if emitter.startswith(start)), None)
    return (name or "not named", *(known or _UNKNOWN))


def _dim(ring: Mapping[str, Any]) -> str:
    dim = ring.get("explicit_strategy_ring_dim") or ring.get("ring_dim") or ""
    return str(dim).removeprefix("ICI_RING_DIM_")


def _find(tree: Any, key: str) -> Any:
    if not isinstance(tree, dict):
        return None
    if key in tree:
        return tree[key]
    return next((found for sub in tree.values() if (found := _find(sub, key)) is not None), None)


def _result_bytes(shape: str, *, is_start: bool) -> int:
    """Return the bytes of a result; that of a -start is (operands, results, ...)."""
    sizes = []
    for item, dims in _ARRAY.findall(shape):
        if item not in _ITEM_BYTES:
            continue
        count = 1
        for dim in filter(None, dims.split(",")):
            count *= int(dim)
        sizes.append(count * _ITEM_BYTES[item])
    if not sizes:
        raise TpuDistError(f"a collective of the compiled program has no known shape: {shape!r}.")
    return max(sizes) if is_start else sum(sizes)


def _groups(rest: str) -> tuple[tuple[int, ...], ...]:
    pairs = _PAIRS.search(rest)
    if pairs:
        return tuple(_numbers(pair) for pair in re.findall(r"\{([\d,]*)\}", pairs[1]))
    match = _GROUPS.search(rest)
    if match is None or match[1] == "{}":
        return ()
    text = match[1]
    if text.startswith("{"):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text))
    shape, _, source = text.partition("<=")
    return _iota_groups(_numbers(shape), source)


def _iota_groups(shape: tuple[int, ...], source: str) -> tuple[tuple[int, ...], ...]:
    """Expand ``[8,16]<=[4,32]T(1,0)``: 0, 1, 2 ... of one shape, transposed, cut into groups."""
    import numpy as np

    dims, _, order = source.partition("T")
    extents = _numbers(dims)
    numbers = np.arange(int(np.prod(extents))).reshape(extents)
    if order:
        numbers = numbers.transpose(_numbers(order))
    return tuple(map(tuple, numbers.reshape(shape[0], -1).tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
