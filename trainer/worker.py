"""``python -m trainer.worker RUN_DIR``: one rank of a run.

It reads the frozen config, joins the other ranks and trains.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from trainer.base import caches, environment, library_logs, rank_info, signals
from trainer.base.errors import EXIT_OK, EXIT_USER, PeerLost
from trainer.base.rank_info import RolloutTask
from trainer.launch import rollout_nodes, run_rank
from trainer.launch.early_stop import leave_untrained


def main(run_dir: Path) -> int:
    """Run this process's rank of ``run_dir``; return its exit code (0, 2, 85, or 1 for a crash)."""
    signals.install()
    return run_rank(run_dir, lambda: run_task(run_dir))


def run_task(run_dir: Path) -> int:
    """Train as this process's rank, or hold servers on a rollout node; return the exit code.

    Raises UserError for wrong input, PeerLost for processes of the run that do not come, and
    StopRequested, wherever it is, for a stop before the first update.
    """
    task = rank_info.rollout_task()
    if task is not None:
        return run_on_rollout_node(run_dir, task)
    info = rank_info.rank_from_environment()
    signals.leave_at_once(partial(leave_untrained, run_dir))
    environment.prepare(info.local_world_size)
    caches.prepare(run_dir)
    from trainer.config import load_frozen
    from trainer.config.user_files import use_frozen

    config = use_frozen(load_frozen(run_dir), run_dir)
    rollout_nodes.require(config)
    library_logs.silence_libraries(config.trainer.device)
    # torch from here on: the environment above had to come first
    from trainer.run.loop import train

    with rollout_nodes.lifelines(config, run_dir, info):
        return train(config, run_dir, info)


def run_on_rollout_node(run_dir: Path, task: RolloutTask) -> int:
    """Run a process on a node that only holds vLLM servers; return its exit code.

    The first process of the node is the node agent, the others wait for its end.

    Raises PeerLost when the agent, or rank 0, does not come within ``trainer.join_timeout_s``.
    """
    from trainer.config import load_frozen

    timeout_s = load_frozen(run_dir).trainer.join_timeout_s
    if task.local_id == 0:
        caches.prepare(run_dir)
        from trainer.rollout.vllm.nodes.agent_process import run_node_agent

        return run_node_agent(run_dir, task, timeout_s=timeout_s)
    sys.stdout.write(
        "This node only holds vLLM servers: this process waits for their end "
        f"({rollout_nodes.KEY}).\n"
    )
    sys.stdout.flush()
    address = rollout_nodes.find_agent(run_dir, task.node, time.monotonic() + timeout_s)
    if address is None:
        raise PeerLost(
            "the agent of this node's servers did not come within "
            f"trainer.join_timeout_s={timeout_s:g}"
        )
    rollout_nodes.wait_until_closed(rollout_nodes.connect(address, rollout_nodes.PEER_PATH))
    return EXIT_OK


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.stderr.write(
            "usage: python -m trainer.worker RUN_DIR   (RUN_DIR holds the frozen config.yaml)\n"
        )
        sys.exit(EXIT_USER)
    sys.exit(main(Path(sys.argv[1])))
