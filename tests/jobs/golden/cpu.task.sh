#!/bin/bash
# One process of a run. exec all the way: Slurm's signals must reach Python itself.
hold="env --block-signal=USR2 --block-signal=TERM"; $hold true 2>/dev/null || hold=""   # coreutils before 8.31 cannot
export PYTHONPATH='/runs/a sweep/code/c0de'${PYTHONPATH:+:$PYTHONPATH}
exec $hold "$@"
