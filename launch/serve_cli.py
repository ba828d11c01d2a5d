"""The command line of ``tpu-launch serve``: the rendezvous service, standing alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tpu_dist.launch.console import NAME, say
from tpu_dist.launch.environment import Environment
from tpu_dist.launch.parsing import dashes, new_app, parse_arguments
from tpu_dist.launch.pod import DEFAULT_PORT
from tpu_dist.launch.rendezvous import read_token
from tpu_dist.launch.settings import merge_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What to serve: where to listen, for Prometheus too, and files that prove who may speak."""

    host: str
    port: int
    metrics_port: int | None
    token_file: str | None
    tls_dir: str | None


def run_serve(argv: Sequence[str], environment: Environment) -> int:
    """Serve until a signal, and return the exit status; any number of runs, told apart by name.

    Raises:
        LaunchError: the port is taken, or others could reach the service and it is not protected.
    """
    config = parse_arguments(_app, argv, f"{NAME} serve")
    if not isinstance(config, ServeConfig):
        return int(config) if isinstance(config, int) else 0
    import asyncio
    import logging

    from tpu_dist.launch.service.__main__ import Orders, serve

    given = {"token-file": config.token_file, "tls-dir": config.tls_dir}
    settings = merge_settings(
        {name: text for name, text in given.items() if text is not None}, environment.settings
    )
    directory = settings.get("tls-dir")
    orders = Orders(
        host=config.host,
        port=config.port,
        token=read_token(settings.get("token-file"), environment),
        tls_directory=str(Path(directory.text).absolute()) if directory else None,
        metrics_port=config.metrics_port,
        for_ever=True,
    )

    def on_start(ports: dict[str, int]) -> None:
        page = f", metrics at http://{config.host}:{ports['metrics_port']}/metrics"
        where = f"{config.host}:{ports['port']}"
        say(f"rendezvous at {where}{page if 'metrics_port' in ports else ''}")

    logging.basicConfig(level=logging.INFO, format=f"{NAME} rendezvous: %(message)s")
    asyncio.run(serve(orders, on_start))
    return 0


_app = new_app()


@_app.command(
    context_settings={"token_normalize_func": dashes, "help_option_names": ["-h", "--help"]},
)
def _serve(
    host: Annotated[
        str, typer.Option(metavar="ADDR", help="Address to listen on. Default: all of them.")
    ] = "0.0.0.0",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65_535, help="0: chosen by the system.")
    ] = DEFAULT_PORT,
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65_535, help="For Prometheus. Default: none."),
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="The secret that hosts must have.")
    ] = None,
    tls_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="ca.crt, tls.crt and tls.key, for TLS on both sides."),
    ] = None,
) -> ServeConfig:
    """Run the rendezvous service alone, for any number of runs, until it is ended.

    Hosts find it by --rdzv-endpoint HOST:PORT. It keeps nothing: started anew, it finds its hosts.
    """
    return ServeConfig(
        host=host,
        port=port,
        metrics_port=metrics_port,
        token_file=token_file,
        tls_dir=tls_dir,
    )
