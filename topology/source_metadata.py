"""What the metadata server of Google Compute Engine says to a TPU VM.

Sources: jax's cloud_tpu_cluster.py, torch_xla's _internal/tpu.py, and a dump of a v4-256's tpu-env.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from tpu_dist.topology.claims import Description, combine
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.source_environment import describe_grids
from tpu_dist.topology.source_texts import (
    read_accelerator,
    read_address,
    read_first,
    read_int,
    read_topology,
    read_worker_endpoints,
    read_wrap,
)

SERVER = "169.254.169.254"  # the documented address; its name would need a resolver, without limit
SERVER_VARIABLES = ("GCE_METADATA_IP", "GCE_METADATA_HOST")  # jax's, and Google's libraries'

_PATH = "/computeMetadata/v1/instance/attributes/"
_FLAVOR = "Metadata-Flavor"
_LARGEST = 1 << 20  # bytes
_PAUSE = 0.1  # s, between tries


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataServer:
    """Where the metadata server is, and how long it gets.

    Attributes:
        address: host, or host:port.
        timeout: for all that is asked; a machine elsewhere waits as long at most.
    """

    address: str = SERVER
    timeout: timedelta = timedelta(seconds=3)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> MetadataServer:
        """Return the server that the environment names, else Google's."""
        for name in SERVER_VARIABLES:
            if environ.get(name):
                return cls(address=environ[name])
        return cls()


def describe_metadata(server: MetadataServer) -> Description:
    """Ask the metadata server; says nothing where there is none, or this is no TPU VM. Blocking.

    Raises:
        TopologyError: what it answers cannot be read or contradicts itself, or it fails.
    """
    deadline = time.monotonic() + server.timeout.total_seconds()
    texts = {}
    for key in ("agent-worker-number", "accelerator-type", "worker-network-endpoints", "tpu-env"):
        text = _ask(server, key, deadline)
        if text is _NO_SERVER:
            return Description()
        if text is not None:
            texts[f"metadata {key}"] = text
    return combine(
        [
            Description(
                host=read_first(read_int, texts, "metadata agent-worker-number"),
                hostnames=read_first(
                    read_worker_endpoints, texts, "metadata worker-network-endpoints"
                ),
            ),
            read_first(read_accelerator, texts, "metadata accelerator-type") or Description(),
            *describe_tpu_env(texts.get("metadata tpu-env", "")),
        ]
    )


def describe_tpu_env(text: str) -> list[Description]:
    """Return what the attribute tpu-env says: lines of ``KEY: 'value'``.

    Raises:
        TopologyError: no line of it is one, or a value cannot be read.
    """
    values = {}
    for line in text.splitlines():
        match = re.fullmatch(r"\s*([A-Z][A-Z0-9_]*)\s*:\s*(['\"]?)(.*?)\2\s*", line)
        if match:
            values[f"metadata tpu-env {match[1]}"] = match[3]
    if text.strip() and not values:
        raise TopologyError(
            f"the metadata server's tpu-env cannot be read: expected lines as in "
            f"ACCELERATOR_TYPE: 'v4-8', found {text.strip()[:80]!r}. Set TPU_SKIP_MDS_QUERY=1 and "
            f"the TPU_* variables instead."
        )

    def name(key: str) -> str:
        return f"metadata tpu-env {key}"

    shape, twisted = read_first(read_topology, values, name("TPU_TOPOLOGY"), name("TOPOLOGY")) or (
        None,
        None,
    )
    return [
        Description(
            shape=shape,
            twisted=twisted,
            wrap=read_first(read_wrap, values, name("TPU_TOPOLOGY_WRAP"), name("WRAP")),
            host=read_first(read_int, values, name("WORKER_ID")),
            num_slices=read_first(read_int, values, name("MEGASCALE_NUM_SLICES")),
            slice_index=read_first(read_int, values, name("MEGASCALE_SLICE_ID")),
            coordinator=read_first(read_address, values, name("MEGASCALE_COORDINATOR_ADDRESS")),
        ),
        read_first(read_accelerator, values, name("ACCELERATOR_TYPE")) or Description(),
        *describe_grids(values, name("")),
        *describe_grids(values, name("TPU_")),
    ]


_NO_SERVER = "\0"  # is in no text that a server sends as one


def _connect(address: str, timeout: float) -> http.client.HTTPConnection:
    try:
        return http.client.HTTPConnection(address, timeout=timeout)
    except http.client.InvalidURL as error:
        raise TopologyError(
            f"the metadata server's address {address!r} cannot be read: {error}. Correct or unset "
            f"{' and '.join(SERVER_VARIABLES)}."
        ) from None


def _ask(server: MetadataServer, key: str, deadline: float) -> str | None:
    """Return an attribute's text, None if it has no such, or _NO_SERVER."""
    status = None
    while (left := deadline - time.monotonic()) > 0:
        connection = _connect(server.address, left)
        try:
            connection.request("GET", _PATH + key, headers={_FLAVOR: "Google"})
            response = connection.getresponse()
            body = response.read(_LARGEST)
        except (OSError, http.client.HTTPException):
            return _NO_SERVER
        finally:
            connection.close()
        status = response.status
        if response.getheader(_FLAVOR) != "Google":
            return _NO_SERVER  # something else that answers at this address
        if status == 404:
            return None
        if status == 200:
            try:
                return body.decode()
            except UnicodeDecodeError:
                raise TopologyError(
                    f"the metadata server's {key} is no text. Set TPU_SKIP_MDS_QUERY=1 and the "
                    f"TPU_* variables instead."
                ) from None
        time.sleep(_PAUSE)
    raise TopologyError(
        f"the metadata server at {server.address} did not tell {key} within "
        f"{server.timeout.total_seconds():g} s (last status: {status}). Try again, or set "
        f"TPU_SKIP_MDS_QUERY=1 and the TPU_* variables."
    )
