"""Who may speak to the service: a job's token, or certificates on both sides."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc

from tpu_dist.launch.errors import LaunchError

MIN_TOKEN_CHARACTERS = 16
_HEADER = "authorization"

# What Kubernetes calls them in a secret of type kubernetes.io/tls, as cert-manager writes it.
_CA, _CERTIFICATE, _KEY = "ca.crt", "tls.crt", "tls.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """What a run's hosts prove themselves by.

    Attributes:
        token: a secret of the job; sent with each connection, in the clear without TLS.
        tls_directory: holds ca.crt, tls.crt and tls.key; server and hosts then show certificates.
    """

    token: str | None = None
    tls_directory: Path | None = None

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < MIN_TOKEN_CHARACTERS:
            raise LaunchError(
                f"the rendezvous token has {len(self.token)} characters, and needs at least "
                f"{MIN_TOKEN_CHARACTERS}: openssl rand -hex 16 makes one"
            )

    def check_listening(self, host: str) -> None:
        """Look whether a service protected so may listen there.

        Raises:
            LaunchError: it is not protected, and others than this machine reach it.
        """
        if self.token is None and self.tls_directory is None and not is_loopback(host):
            raise LaunchError(
                f"the rendezvous would listen on {host}, where others can reach it, and hosts have "
                f"nothing to prove themselves by. Put the same secret into a file on all hosts "
                f"(openssl rand -hex 16) and set TPU_LAUNCH_TOKEN_FILE to it, or set "
                f"TPU_LAUNCH_TLS_DIR to a directory with {_CA}, {_CERTIFICATE} and {_KEY}"
            )

    def admits(self, metadata: object) -> bool:
        """Whether a peer that sent this metadata may speak."""
        if self.token is None:
            return True
        given = dict(metadata).get(_HEADER, "")  # type: ignore[call-overload]
        expected = f"Bearer {self.token}"
        return hmac.compare_digest(str(given).encode(), expected.encode())

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what a host sends along."""
        return ((_HEADER, f"Bearer {self.token}"),) if self.token is not None else ()

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return the server's side of TLS; None without."""
        if self.tls_directory is None:
            return None
        authority, certificate, key = self._read()
        return grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=authority, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return a host's side of TLS; None without."""
        if self.tls_directory is None:
            return None
        authority, certificate, key = self._read()
        return grpc.ssl_channel_credentials(
            root_certificates=authority, private_key=key, certificate_chain=certificate
        )

    def _read(self) -> tuple[bytes, bytes, bytes]:
        assert self.tls_directory is not None
        try:
            authority, certificate, key = (
                (self.tls_directory / name).read_bytes() for name in (_CA, _CERTIFICATE, _KEY)
            )
        except OSError as error:
            raise LaunchError(f"TLS: {error.filename}: {error.strerror}") from error
        return authority, certificate, key


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each)).is_loopback for each in found)
