"""How ranks find each other: a TCP store whose port rank 0 binds and publishes in the run folder;
then a roll call.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import HashStore, Store, TCPStore
from xxhash import xxh3_64_intdigest

from trainer.base.environment import RankInfo, attempt_name
from trainer.base.errors import UserError

FIRST_PORT, LAST_PORT = (
    10_000,
    32_000,
)  # below the ephemeral range, where the kernel hands out ports by itself


def port_for(name: str) -> int:
    """Where to begin to look for a port: another one for every name, so that the runs of a node
    seldom collide.
    """
    return FIRST_PORT + xxh3_64_intdigest(name.encode()) % (LAST_PORT - FIRST_PORT)


def free_port(start: int, tries: int = 200) -> int:
    """The first port from ``start`` on that can be bound on this node. Raises UserError when none
    of ``tries`` can.
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
    """The store all ranks share: at ``info.master_port`` where one is given; otherwise rank 0
    publishes its own.

    Raises TimeoutError that names the ranks which did not come within ``timeout_s``, UserError on
    rank 0 for a port that another program has.
    """
    if info.world_size == 1:
        return HashStore()
    until = time.monotonic() + timeout_s
    if info.master_port is not None:
        store = _open_given(info, info.master_port, timeout_s)
    else:
        note = _note(run_dir)
        if info.rank == 0:
            store = _publish(info, note, timeout_s)
        else:
            store = _open(info, *_read(note, timeout_s), max(1.0, until - time.monotonic()))
    _roll_call(store, info, timeout_s, until)
    return store


def _note(run_dir: Path) -> Path:
    """The file with this attempt's port. An earlier attempt's note must never be taken for it."""
    if (name := attempt_name()) is None:
        raise UserError(
            "this rank was started with RANK and WORLD_SIZE, but without MASTER_PORT: set it to a "
            "port that is free on "
            "rank 0's machine, or let 'python -m trainer' start the ranks."
        )
    return run_dir / "rendezvous" / f"{name}.json"


def _open(info: RankInfo, addr: str, port: int, timeout_s: float) -> TCPStore:
    wait = timedelta(seconds=timeout_s)
    return TCPStore(
        addr, port, info.world_size, info.rank == 0, timeout=wait, wait_for_workers=False
    )


def _open_given(info: RankInfo, port: int, timeout_s: float) -> TCPStore:
    try:
        return _open(info, info.master_addr, port, timeout_s)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"MASTER_PORT={port} is in use on rank 0's machine, by another run or another program: "
            "set it to a free one"
        ) from error


def _publish(info: RankInfo, note: Path, timeout_s: float) -> TCPStore:
    """Bind first, then tell: a port that another process took between probe and bind is skipped."""
    note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    start = port_for(str(note))
    for _ in range(20):
        port = free_port(start)
        try:
            store = _open(info, info.master_addr, port, timeout_s)
        except RuntimeError:
            start = port + 1
            continue
        temp = note.with_suffix(f".{os.getpid()}")
        temp.write_text(json.dumps({"addr": info.master_addr, "port": port}))
        temp.replace(note)
        return store
    raise UserError(
        f"no port from {start} on could be bound on {info.master_addr}; set MASTER_PORT to a free "
        "one"
    )


def _read(note: Path, timeout_s: float) -> tuple[str, int]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            found = json.loads(note.read_text())
            return str(found["addr"]), int(found["port"])
        except (FileNotFoundError, ValueError):
            time.sleep(0.05)
    raise TimeoutError(
        f"rank 0 did not come: no port was published in {note} within "
        f"trainer.join_timeout_s={timeout_s:g}. Its log "
        "says why; on several nodes also check that all see the same run folder."
    )


def _roll_call(store: Store, info: RankInfo, timeout_s: float, until: float) -> None:
    """Wait until every rank has signed in, and name those that have not."""
    store.set(f"here/{info.rank}", socket.gethostname())
    keys = [f"here/{rank}" for rank in range(info.world_size)]
    late = (
        0.0 if info.rank == 0 else 2.0
    )  # rank 0 holds the store: it is the one to tell, the others wait for its word
    try:
        store.wait(keys, timedelta(seconds=max(0.1, until + late - time.monotonic())))
    except RuntimeError as error:
        missing = _absent(store, info.world_size)
        if missing is None:
            raise RuntimeError("rank 0 has left the ranks' meeting; its log says why") from error
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise TimeoutError(
            f"{len(missing)} of {info.world_size} ranks did not come within "
            f"trainer.join_timeout_s={timeout_s:g}: rank "
            f"{names}. Look into their logs; where images or file systems start slowly, raise the "
            "key."
        ) from None


def _absent(store: Store, size: int) -> list[int] | None:
    try:
        return [rank for rank in range(size) if not store.check([f"here/{rank}"])]
    except RuntimeError:
        return None
