"""The rendezvous of a single host."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousInfo

from tpu_dist.launch.rendezvous import STANDALONE, open_rendezvous


def client(info: RendezvousInfo) -> TCPStore:
    at = info.bootstrap_store_info
    assert at is not None
    return TCPStore(at.master_addr, at.master_port, is_master=False, timeout=timedelta(seconds=5))


def test_a_round_is_this_host_alone_with_a_store_that_workers_can_use() -> None:
    rendezvous = open_rendezvous(STANDALONE, "run")
    assert rendezvous.use_agent_store
    assert (rendezvous.get_backend(), rendezvous.get_run_id()) == (STANDALONE, "run")
    info = rendezvous.next_rendezvous()
    assert (info.rank, info.world_size, rendezvous.num_nodes_waiting()) == (0, 1, 0)
    client(info).set("key", "value")
    assert client(info).get("key") == b"value"
    rendezvous.shutdown()


def test_rounds_and_runs_share_no_store() -> None:
    first, second = open_rendezvous(STANDALONE, "a"), open_rendezvous(STANDALONE, "b")
    infos = [first.next_rendezvous(), second.next_rendezvous(), first.next_rendezvous()]
    addresses = [info.bootstrap_store_info for info in infos]
    ports = {address.master_port for address in addresses if address is not None}
    assert len(ports) == 3
    assert all(address is not None and address.master_addr == "127.0.0.1" for address in addresses)
    first.shutdown()
    second.shutdown()


def test_there_is_no_round_after_the_end() -> None:
    rendezvous = open_rendezvous(STANDALONE, "run")
    rendezvous.set_closed()
    assert rendezvous.is_closed()
    with pytest.raises(RendezvousClosedError, match="'run' is over"):
        rendezvous.next_rendezvous()
