#!/bin/bash
# One process of a run. exec all the way: Slurm's signals must reach Python itself.
for name in PLIMSOLL_CACHE HF_HOME TRITON_CACHE_DIR TORCH_EXTENSIONS_DIR XDG_CACHE_HOME; do [ -d "${!name}" ] || export "$name="'/runs/a sweep/cache'/"$name"; done
hold="env --block-signal=USR2 --block-signal=TERM"; $hold true 2>/dev/null || hold=""   # coreutils before 8.31 cannot
export PYTHONPATH='/runs/a sweep/code/c0de'
exec $hold "$@"
