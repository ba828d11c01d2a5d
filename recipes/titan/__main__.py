"""Train with torchtitan.

    tpu-launch --nproc-per-node 2 -m tpu_dist.recipes.titan --config llama3_debug
    torchrun --nproc-per-node 2 -m tpu_dist.recipes.titan --config llama3_debug --device cpu

What is not an option of this program is one of torchtitan's, such as --training.steps 20.
See docs/recipes.md, or --config NAME --help.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from tpu_dist.errors import TpuDistError
from tpu_dist.recipes.titan import compatibility
from tpu_dist.topology.system import System

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

_CONFIGS = "tpu_dist.recipes.titan.configs"


def main(arguments: list[str] | None = None) -> None:
    """Run one process of a training."""
    parser = _parser()
    options, of_torchtitan = parser.parse_known_args(arguments)
    try:
        compatibility.prepare(options.device)
        config = _config(options, of_torchtitan, parser)
    except (TpuDistError, ValueError) as error:
        parser.error(str(error))
    from tpu_dist.recipes.titan.run import run

    run(config, topology=options.topology)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tpu_dist.recipes.titan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="NAME", help="what to train; without it, the names are listed"
    )
    parser.add_argument(
        "--module",
        default=_CONFIGS,
        help="Python module that has the configuration functions (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default="tpu",
        choices=compatibility.DEVICES,
        help="where tensors live: tpu, or cpu with gloo, to compare (default: %(default)s)",
    )
    parser.add_argument(
        "--topology",
        metavar="v5p:4x4x4",
        help="the slice or slices that the parallelism is chosen for, and the mesh laid on",
    )
    return parser


def _config(
    options: argparse.Namespace, of_torchtitan: list[str], parser: argparse.ArgumentParser
) -> JobConfig:
    import tyro
    from torchtitan.config import ConfigManager
    from torchtitan.config.manager import custom_registry

    if options.config is None and {"-h", "--help"} & {*of_torchtitan}:
        parser.print_help()
        sys.exit()
    try:
        module = importlib.import_module(options.module)
    except ModuleNotFoundError as error:
        raise ValueError(f"--module {options.module} cannot be imported: {error}") from error
    known = {
        name: function
        for name, function in vars(module).items()
        if getattr(function, "__module__", None) == module.__name__
        and callable(function)
        and not name.startswith("_")
    }
    if options.config not in known:
        asked = "no --config was given" if options.config is None else f"--config {options.config}"
        raise ValueError(f"{asked}; {options.module} has {', '.join(known)}")
    topology = None if options.topology is None else System.parse(options.topology)
    default: JobConfig = known[options.config](topology)
    ConfigManager()  # registers how lists are read
    config: JobConfig = tyro.cli(
        type(default),
        args=of_torchtitan,
        default=default,
        registry=custom_registry,
        prog=parser.prog,
        description=parser.format_help(),
    )
    for option in ("config_file", "custom_config_module"):
        if getattr(config.job, option):
            raise ValueError(
                f"--job.{option} is not read here: a configuration is a function. Give its values "
                f"as options, or write a module and name it with --module."
            )
    return config


if __name__ == "__main__":
    main()
