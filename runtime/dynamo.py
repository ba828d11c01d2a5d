"""Keeping torch's compiler out of functions that it cannot read, or must not."""

from __future__ import annotations

from typing import Any

from torch._C._dynamo import eval_frame


def keep_out_dynamo(function: Any, what: str) -> None:
    """Have dynamo break its graph at `function`, and leave alone all that it calls.

    What torch._dynamo.disable() does, but for its cost: 15 us a call, and the import of all of
    torch._dynamo, seconds of CPU time in the start of every rank.

    Args:
        function: a plain function.
        what: it is, for the reports of graph breaks.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = what
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)  # itself, and the frames below
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
