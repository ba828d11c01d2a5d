"""The tree of errors that the project raises: what was asked, what was found, what to do."""

from __future__ import annotations


class TpuDistError(RuntimeError):
    """Root of the tree; a RuntimeError, as the errors of torch.distributed are."""


class TopologyError(TpuDistError):
    """What the machine reports of its TPUs cannot be, or does not fit what was asked."""


class BringUpError(TpuDistError):
    """The runtime of this process, or its connection to the others, could not be started."""


class CollectiveError(TpuDistError):
    """A collective failed; the group that ran it can only be destroyed."""


class CollectiveTimeoutError(CollectiveError):
    """A collective was not finished by all of its ranks within its timeout."""


class PeerLostError(CollectiveError):
    """The process of a peer has ended, or can no longer be reached."""


class MismatchError(CollectiveError):
    """The ranks of a group called different collectives; nothing was sent, the group lives on."""


class UnsupportedError(TpuDistError):
    """The combination that was asked for means nothing, or cannot be had on this platform."""
