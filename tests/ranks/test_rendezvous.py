"""How ranks find each other: one port, found by the one that binds it; who doesn't come is
named.
"""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import Store

from trainer.base.errors import UserError
from trainer.base.rank_info import RankInfo
from trainer.ranks.rendezvous import FIRST_PORT, LAST_PORT, free_port, meet, port_for


def info(rank: int, size: int, port: int | None = None) -> RankInfo:
    return RankInfo(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        master_addr="127.0.0.1",
        master_port=port,
    )


def gather(
    run: Path, ranks: list[int], size: int, timeout_s: float, port: int | None = None
) -> list[Store | str]:
    """What each of ``ranks`` gets: the store, or its error's text."""

    def one(rank: int) -> Store | str:
        try:
            return meet(info(rank, size, port), run_dir=run, timeout_s=timeout_s)
        except (RuntimeError, UserError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.fixture(autouse=True)
def attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "2")


def test_ranks_meet_where_rank_0_could_bind(tmp_path: Path) -> None:
    (tmp_path / "rendezvous").mkdir()  # what an earlier attempt left is not taken for this one's
    (tmp_path / "rendezvous/attempt_1.json").write_text('{"addr": "127.0.0.1", "port": 1}')
    wanted = free_port(port_for(str(tmp_path / "rendezvous/attempt_2.json")))
    with socket.socket() as taken:  # another program has the port that would come first
        taken.bind(("", wanted))
        taken.listen()
        one, other = gather(tmp_path, [1, 0], 2, 300)
    assert isinstance(one, Store) and isinstance(other, Store), (one, other)
    one.set("word", "heard")
    assert other.get("word") == b"heard"
    assert json.loads((tmp_path / "rendezvous/attempt_2.json").read_text())["port"] != wanted


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    for seconds in (1, 10, 60):  # on a busy machine rank 2 may need more
        first, second = gather(tmp_path / f"{seconds}", [0, 2], 4, seconds)
        wanted = f"2 of 4 ranks did not come within trainer.join_timeout_s={seconds}: rank 1, 3."
        if wanted in str(first):
            break
    assert isinstance(first, str) and wanted in first
    assert isinstance(second, str) and ("rank 1, 3." in second or "rank 0 has left" in second)


def test_rank_0_that_does_not_come_is_named(tmp_path: Path) -> None:
    (said,) = gather(tmp_path, [1], 2, 0.2)
    assert isinstance(said, str) and "rank 0 did not come" in said and "attempt_2.json" in said


def test_a_given_port_is_used(tmp_path: Path) -> None:
    port = free_port(port_for(str(tmp_path)))
    assert all(isinstance(one, Store) for one in gather(tmp_path, [0, 1], 2, 300, port))
    assert not (tmp_path / "rendezvous").exists()


def test_a_given_port_that_another_program_has_is_the_users_to_mend(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (said,) = gather(tmp_path, [0], 2, 300, port)
    assert isinstance(said, str) and said.startswith(
        f"UserError: MASTER_PORT={port} is in use on rank 0's machine"
    )


def test_ranks_started_by_hand_need_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLIMSOLL_ATTEMPT")
    (said,) = gather(tmp_path, [1], 2, 5)
    assert isinstance(said, str) and "without MASTER_PORT" in said


def test_ports_are_below_the_ephemeral_range() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port(port_for(str(n))) for n in range(20)]
    assert (
        all(FIRST_PORT <= port < LAST_PORT <= max(LAST_PORT, lowest) for port in ports)
        and len(set(ports)) > 10
    )
