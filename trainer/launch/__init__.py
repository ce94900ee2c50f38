"""The processes of one machine: start the ranks of a run, watch them, and end together.

Read ``launcher`` first (start to end), then ``watch`` (what ends a run), ``rank_process``,
``rank_run`` (a rank, from its begin record to its end record) and ``screen`` (how rank 0's output
reaches the terminal). ``rollout_nodes`` connects to nodes that only hold vLLM servers. No torch.
"""

from trainer.launch.launcher import run
from trainer.launch.rank_run import run_rank

__all__ = ["run", "run_rank"]
