"""How many parameters a model has in each of its FSDP units; for ``tpu-launch plan``.

As a program (``python -m tpu_dist.recipes.parameter_sizes WHAT``) it writes them as a line of JSON:
``{"units": [...], "root": ...}``, elements of each block, and of what goes with the root. The model
is made on torch's meta device: nothing of it is held.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpu_dist.topology.errors import TpuDistError


def _kjv() -> nn.Module:
    from tpu_dist.recipes.kjv_config import KjvConfig
    from tpu_dist.recipes.model import DecoderLM

    config = KjvConfig()
    return DecoderLM(
        config.model,
        vocabulary_size=config.tokenizer.vocabulary_size,
        sequence_length=config.train.batch.sequence_length,
    )


RECIPES: Mapping[str, Callable[[], nn.Module]] = {"kjv": _kjv}


def model_of(what: str) -> nn.Module:
    """Return a recipe's model, or what a function of the user's returns, on the meta device.

    Args:
        what: a recipe's name, or ``file.py:function`` or ``module:function``.

    Raises:
        TpuDistError: there is none, or it returns no module.
    """
    build = RECIPES.get(what) or _function(what)
    with torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise TpuDistError(f"{what} returned a {type(model).__name__}, and not an nn.Module.")
    return model


def unit_sizes(model: nn.Module) -> dict[str, Any]:
    """Return the elements of each FSDP unit: the entries of module lists, outermost, and the rest.

    A parameter that two modules share counts once.
    """
    seen: set[int] = set()

    def count(parameters: Iterator[nn.Parameter]) -> int:
        fresh = {id(p): p.numel() for p in parameters if id(p) not in seen}
        seen.update(fresh)
        return sum(fresh.values())

    units = [count(block.parameters()) for block in _blocks(model)]
    return {"units": units, "root": count(model.parameters())}


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from child.children()
        else:
            yield from _blocks(child)


def _function(what: str) -> Callable[[], Any]:
    place, _, name = what.rpartition(":")
    if not place:
        raise TpuDistError(
            f"no recipe is called {what!r}; there are {', '.join(RECIPES)}. A model of your own "
            f"is given as file.py:function."
        )
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look it up
            sys.path.insert(0, str(Path(place).parent))
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (OSError, ImportError) as error:
        raise TpuDistError(f"{place!r} cannot be imported: {error}.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise TpuDistError(f"{place!r} has no function {name!r}.")
    return function  # type: ignore[no-any-return]


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "w")  # what the user's code prints goes elsewhere
    os.dup2(2, 1)
    try:
        _found = unit_sizes(model_of(sys.argv[1]))
    except Exception as error:  # the edge to the user's code
        _found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(_found), file=_answers, flush=True)
