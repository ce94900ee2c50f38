"""How ranks find each other: a TCP store whose port rank 0 publishes in the run folder."""

from __future__ import annotations

import errno
import socket
import time
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import HashStore, Store, TCPStore
from xxhash import xxh3_64_intdigest

from trainer.base import atomic
from trainer.base.connections import is_port
from trainer.base.errors import PeerLost, UserError
from trainer.base.json_files import is_text, read_object
from trainer.base.rank_info import RankInfo, attempt_name
from trainer.ranks.listening import listening_store

FIRST_PORT = 10_000
LAST_PORT = 32_000
"""Below the ephemeral range, from which the kernel hands out ports by itself."""
POLL_S = 0.05
GRACE_OF_OTHERS_S = 2.0
"""How much longer ranks other than 0 wait: rank 0 holds the store, and its message names the ranks
that are missing.
"""


def port_for(name: str) -> int:
    """The first port to try for ``name``; different names rarely get the same one."""
    return FIRST_PORT + xxh3_64_intdigest(name.encode()) % (LAST_PORT - FIRST_PORT)


def free_port(start: int, tries: int = 200) -> int:
    """The first port from ``start`` on that can be bound on this node.

    Raises UserError when none of ``tries`` can.
    """
    span = LAST_PORT - FIRST_PORT
    for offset in range(tries):
        port = FIRST_PORT + (start - FIRST_PORT + offset) % span
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UserError(f"no free port among {tries} from {start} on; set MASTER_PORT to a free one")


def meet(info: RankInfo, *, run_dir: Path, timeout_s: float) -> Store:
    """The store that all ranks share, once all of them have joined it.

    Its port is ``info.master_port``, or one that rank 0 publishes. Raises PeerLost that names
    the ranks which did not come within ``timeout_s``, and UserError on rank 0 for a port that
    another program uses.
    """
    if info.world_size == 1:
        return HashStore()
    deadline = time.monotonic() + timeout_s
    if info.master_port is not None:
        store = _open_given_port(info, info.master_port, timeout_s)
    else:
        address_file = _address_file(run_dir)
        if info.rank == 0:
            store = _open_and_publish(info, address_file, timeout_s)
        else:
            host, port = _wait_for_address(address_file, timeout_s)
            store = _open(info, host, port, max(1.0, deadline - time.monotonic()))
    _wait_for_all(store, info, timeout_s, deadline)
    return store


def _address_file(run_dir: Path) -> Path:
    """The file with this attempt's address; an earlier attempt has another one."""
    name = attempt_name()
    if name is None:
        raise UserError(
            "this rank was started with RANK and WORLD_SIZE, but without MASTER_PORT: set it to a "
            "port that is free on rank 0's machine, or let 'python -m trainer' start the ranks."
        )
    return run_dir / "rendezvous" / f"{name}.json"


def _open(info: RankInfo, host: str, port: int, timeout_s: float) -> TCPStore:
    """Open the store, on rank 0 as the one who serves it. Raises OSError for a port in use."""
    timeout = timedelta(seconds=timeout_s)
    if info.rank == 0:
        one_node = info.local_world_size == info.world_size
        return listening_store(
            host, port, ranks=info.world_size, one_node=one_node, timeout=timeout
        )
    return TCPStore(host, port, info.world_size, False, timeout=timeout, wait_for_workers=False)


def _open_given_port(info: RankInfo, port: int, timeout_s: float) -> TCPStore:
    try:
        return _open(info, info.master_addr, port, timeout_s)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise UserError(
            f"MASTER_PORT={port} is in use on rank 0's machine, by another run or another program: "
            "set it to a free one"
        ) from error


def _open_and_publish(info: RankInfo, address_file: Path, timeout_s: float) -> TCPStore:
    """Bind first, then publish: a port that was taken since it was probed is skipped."""
    address_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    start = port_for(str(address_file))
    for _ in range(20):
        port = free_port(start)
        try:
            store = _open(info, info.master_addr, port, timeout_s)
        except OSError:
            start = port + 1
            continue
        atomic.write_json(address_file, {"addr": info.master_addr, "port": port})
        return store
    raise UserError(
        f"no port from {start} on could be bound on {info.master_addr}; set MASTER_PORT to a free "
        "one"
    )


def _wait_for_address(address_file: Path, timeout_s: float) -> tuple[str, int]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        address = read_object(address_file, {"addr": is_text, "port": is_port})
        if "addr" in address and "port" in address:
            return address["addr"], address["port"]
        time.sleep(POLL_S)
    raise PeerLost(
        f"rank 0 did not come: no port was published in {address_file} within "
        f"trainer.join_timeout_s={timeout_s:g}. Its log says why; on several nodes also check that "
        "all see the same run folder."
    )


def _wait_for_all(store: Store, info: RankInfo, timeout_s: float, deadline: float) -> None:
    """Wait until every rank has joined the store. Raises PeerLost that names the others."""
    store.set(_joined_key(info.rank), socket.gethostname())
    keys = [_joined_key(rank) for rank in range(info.world_size)]
    if info.rank != 0:
        deadline += GRACE_OF_OTHERS_S
    try:
        store.wait(keys, timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except RuntimeError as error:
        missing = _missing_ranks(store, info.world_size)
        if missing is None:
            raise PeerLost("rank 0 has left the ranks' meeting; its log says why") from error
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise PeerLost(
            f"{len(missing)} of {info.world_size} ranks did not come within "
            f"trainer.join_timeout_s={timeout_s:g}: rank {names}. Look into their logs; where "
            "images or file systems start slowly, raise the key."
        ) from None


def _missing_ranks(store: Store, size: int) -> list[int] | None:
    """Ranks that have not joined; None when the store is gone."""
    try:
        return [rank for rank in range(size) if not store.check([_joined_key(rank)])]
    except RuntimeError:
        return None


def _joined_key(rank: int) -> str:
    return f"joined/{rank}"
