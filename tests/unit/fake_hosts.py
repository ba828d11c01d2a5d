"""TPU hosts for tests: sysfs and /dev as directories, the metadata server as a loopback server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ATTRIBUTES = "/computeMetadata/v1/instance/attributes/"


def add_function(
    root: Path,
    address: str,
    device: str,
    *,
    vendor: str = "0x1ae0",
    subsystem: str = "0x0000",
    group: int | None = None,
) -> None:
    """Add a PCI function to the sysfs under `root`."""
    function = root / "sys/bus/pci/devices" / address
    function.mkdir(parents=True)
    (function / "vendor").write_text(f"{vendor}\n")
    (function / "device").write_text(f"{device}\n")
    (function / "subsystem_device").write_text(f"{subsystem}\n")
    if group is not None:
        (function / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{group}")


def add_node(root: Path, name: str) -> None:
    """Add a device file."""
    node = root / "dev" / name
    node.parent.mkdir(parents=True, exist_ok=True)
    node.touch()


def vfio_host(root: Path, device: str, *, chips: int, nodes: int, functions: int = 1) -> None:
    """Make a host of the newer generations."""
    for chip in range(chips):
        for function in range(functions):
            add_function(root, f"0000:00:{chip + 4:02x}.{function}", device, group=chip)
    for node in range(nodes):
        add_node(root, f"vfio/{node}")
    add_node(root, "vfio/vfio")


def accel_host(root: Path, device: str, subsystem: str, *, chips: int) -> None:
    """Make a host of the older generations."""
    for chip in range(chips):
        add_function(root, f"0000:00:{chip + 4:02x}.0", device, subsystem=subsystem)
        add_node(root, f"accel{chip}")
    add_node(root, "accel_not")


@contextmanager
def metadata_server(
    attributes: Mapping[str, str | bytes],
    *,
    flavor: str | None = "Google",
    failures: int = 0,
) -> Iterator[str]:
    """Serve the attributes as a GCE metadata server does, and yield its address.

    Args:
        attributes: text by key; others are answered with 404.
        flavor: what the answers say that the server is.
        failures: how many requests to answer with 503 first.
    """
    left = [failures]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.path.removeprefix(ATTRIBUTES)
            status = 200 if key in attributes and self.headers["Metadata-Flavor"] else 404
            if left[0]:
                status, left[0] = 503, left[0] - 1
            self.send_response(status)
            if flavor is not None:
                self.send_header("Metadata-Flavor", flavor)
            self.end_headers()
            if status == 200:
                value = attributes[key]
                self.wfile.write(value if isinstance(value, bytes) else value.encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
