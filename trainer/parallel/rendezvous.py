"""How ranks find each other: a TCP store whose port is probed on rank 0 and published through the run folder."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import HashStore, Store, TCPStore
from xxhash import xxh3_64_intdigest

from trainer.environment import RankInfo
from trainer.errors import UserError

FIRST_PORT, LAST_PORT = 10_000, 32_000  # below the ephemeral range, where the kernel hands out ports by itself


def port_for(job: str) -> int:
    """The first port to try for a job id: the same on every rank, another one for the next job on the node."""
    return FIRST_PORT + xxh3_64_intdigest(job.encode()) % (LAST_PORT - FIRST_PORT)


def free_port(start: int, tries: int = 200) -> int:
    """The first port from ``start`` on that can be bound on this node. Raises UserError when none of ``tries`` can."""
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
    """The store all ranks share: at ``info.master_port`` where one is given; otherwise rank 0 publishes its own."""
    if info.world_size == 1:
        return HashStore()
    wait = timedelta(seconds=timeout_s)
    if info.master_port is not None:
        return TCPStore(info.master_addr, info.master_port, info.world_size, info.rank == 0, timeout=wait)
    job = "-".join(os.environ.get(k, "0") for k in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
    note = run_dir / "rendezvous" / f"{job}.json"
    if info.rank == 0:
        return _publish(info, note, port_for(job), wait)
    return TCPStore(*_read(note, timeout_s), info.world_size, False, timeout=wait)


def _publish(info: RankInfo, note: Path, start: int, wait: timedelta) -> TCPStore:
    """Bind first, then tell: a port that another process took between probe and bind is skipped."""
    note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(20):
        port = free_port(start)
        try:
            store = TCPStore(info.master_addr, port, info.world_size, True, timeout=wait, wait_for_workers=False)
        except RuntimeError:
            start = port + 1
            continue
        temp = note.with_suffix(f".{os.getpid()}")
        temp.write_text(json.dumps({"addr": info.master_addr, "port": port}))
        temp.replace(note)
        return store
    raise UserError(f"no port from {start} on could be bound on {info.master_addr}; set MASTER_PORT to a free one")


def _read(note: Path, timeout_s: float) -> tuple[str, int]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            found = json.loads(note.read_text())
            return str(found["addr"]), int(found["port"])
        except (FileNotFoundError, ValueError):
            time.sleep(0.05)
    raise TimeoutError(f"rank 0 did not publish its port in {note} within {timeout_s:.0f} s")
