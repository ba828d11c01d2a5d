"""The process group that init_process_group("tpu_dist") and new_group make."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from tpu_dist._collectives import CollectiveVerbs
from tpu_dist._validation import check_output, check_rank, check_tensor, only
from tpu_dist._work import Work
from tpu_dist.collectives.task import Call
from tpu_dist.errors import UnsupportedError
from tpu_dist.runtime.dynamo import keep_out_dynamo

ANY_SOURCE = -1

# What torch reaches on a group; dynamo must not trace into them: it cannot read the attributes
# of a C++ object's Python half (torch 2.13: UnsafeScriptObjectError).
_VERBS = """
allreduce allreduce_coalesced broadcast reduce allgather allgather_coalesced all_gather_single
all_gather_single_coalesced gather scatter reduce_scatter reduce_scatter_single
reduce_scatter_single_coalesced alltoall all_to_all_single send recv recv_anysource barrier
monitored_barrier _start_coalescing _end_coalescing _allgather_base
allgather_into_tensor_coalesced _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall_base
""".split()


class ProcessGroup(CollectiveVerbs):
    """A c10d process group whose collectives are XLA programs on the ranks' devices.

    Runnable example, on two processes of one machine (`tpu-launch --nproc-per-node 2 example.py`):

        import torch, torch.distributed as dist
        dist.init_process_group("tpu_dist")
        x = torch.full((4,), float(dist.get_rank()))
        dist.all_reduce(x)                    # tensor([1., 1., 1., 1.])
        dist.destroy_process_group()
    """

    # --- messages

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Work:
        """Send a tensor to a group rank; done when it has been received."""
        tensor = self._message("send", tensors)
        peer = self._peer("send", destination)
        task, work = self._begin(
            self._message_call("send", peer, tag), self._timeout, self._job.messages, [tensor], []
        )
        self._job.messages.send(task, tensor, peer, tag)
        return self._collect(work)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        """Receive from a group rank into a tensor of the sender's dtype and size."""
        return self._receive("recv", tensors, self._peer("recv", source), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive from whoever sends first; the work's source_rank() says who it was."""
        return self._receive("recvAnySource", tensors, None, tag)

    def _receive(self, verb: str, tensors: Any, peer: int | None, tag: int) -> Work:
        tensor = check_output(verb, self._message(verb, tensors))
        task, work = self._begin(
            self._message_call(verb, peer, tag),
            self._timeout,
            self._job.messages,
            [tensor],
            [tensor],
        )

        def found(source: int) -> None:
            work.set_source(self._ranks.index(source))

        self._job.messages.receive(task, tensor, peer, tag, found)
        return self._collect(work)

    def _message(self, verb: str, tensors: Any) -> torch.Tensor:
        self._refuse_if_ended(verb)
        return check_tensor(verb, only(verb, tensors, "tensors"))

    def _peer(self, verb: str, group_rank: int) -> int:
        return self._ranks[check_rank(verb, group_rank, self.size(), "the peer")]

    def _message_call(self, verb: str, peer: int | None, tag: int) -> Call:
        others = tuple(rank for rank in self._ranks if rank != self._job.rank)
        direction = "to" if verb == "send" else "from"
        return Call(
            group=self._name,
            uid=self._uid,
            sequence=0,
            verb=verb,
            ranks=others if peer is None else (peer,),
            detail=f"{direction} {'any rank' if peer is None else f'rank {peer}'}, tag {tag}",
        )

    # --- other groups

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Make a group of some of this one's ranks; no rank waits for another.

        Args:
            new_ranks: group ranks of this group, in the order of the new one.
            timeout: for the new group's calls; default: this group's.
            opts: what another group's `options` returned; its timeout counts after `timeout`.
            group_name: default: derived from this group's name and the ranks.
            group_desc: default: derived likewise.
            device_types: of no meaning here; a group serves all of its device types.

        Returns:
            The new group, or None on ranks that are not in it.

        Raises:
            ValueError: the ranks are not distinct ranks of this group.
        """
        self._refuse_if_ended("split_group")
        for rank in new_ranks:
            check_rank("split_group", rank, self.size(), "a member")
        if len(set(new_ranks)) != len(new_ranks) or not new_ranks:
            raise ValueError(f"split_group: new_ranks must be distinct, got {list(new_ranks)}")
        if self._index not in new_ranks:
            return None
        listed = "_".join(map(str, new_ranks))
        name = group_name or f"{self._name}:split:{listed}"
        if timeout is None or timeout <= timedelta(0):
            timeout = getattr(opts, "timeout", None) or self._timeout
        return ProcessGroup(
            self._job,
            PrefixStore(f"{name}/", self._store),
            [self._ranks[rank] for rank in new_ranks],
            timeout,
            name,
            group_desc or f"{self._description}:split:{listed}",
        )

    splitGroup = split_group  # noqa: N815

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> ProcessGroup:
        """Refused: groups of one job are made from its default group."""
        raise UnsupportedError(
            "merge_remote_group: 'tpu_dist' cannot join another job's processes to this one's "
            "slice. Start all of them as one job, and use new_group."
        )

    mergeRemoteGroup = merge_remote_group  # noqa: N815


for _verb in _VERBS:
    keep_out_dynamo(getattr(ProcessGroup, _verb), "a verb of the process group tpu_dist")
