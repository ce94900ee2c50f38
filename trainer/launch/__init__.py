"""The processes of one machine: start the ranks of a run, watch them, and end together.

Read ``launcher`` first (start to end), then ``watch`` (what ends a run), ``rank_process``,
``error_file`` (how a rank's error reaches the launcher) and ``screen`` (how rank 0's output reaches
the terminal). ``rollout_nodes`` connects to the nodes that only hold vLLM servers. No torch.
"""

from trainer.launch.error_file import report_error
from trainer.launch.launcher import run

__all__ = ["report_error", "run"]
