#!/bin/bash
# down.sh [LAB] [now]: end the daemons that up.sh started, by the pids it noted, workers first. "now": LAB is thrown away, so
# nothing need be written any more.
LAB=$(realpath -m "${1:-/tmp/plimsoll-cluster}"); export SLURM_CONF=$LAB/conf/slurm.conf
[ -d "$LAB"/pid ] || exit 0
timeout 5 scancel --user="$(id -un)" 2>/dev/null
for _ in $(seq 50); do [ -z "$(timeout 2 squeue -h -t R,CG 2>/dev/null)" ] && break; sleep .1; done
for file in "$LAB"/pid/slurmd-*.pid; do [ -s "$file" ] && kill "$(cat "$file")" 2>/dev/null; done   # all at once
for name in $(cd "$LAB"/pid && ls slurmd-*.pid 2>/dev/null) slurmctld.pid slurmdbd.pid mariadbd.pid munged.pid; do
  file=$LAB/pid/$name; [ -s "$file" ] || continue
  pid=$(cat "$file"); [ "${2:-}" = now ] && kill -9 "$pid" 2>/dev/null || kill "$pid" 2>/dev/null
  for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep .1; done
  kill -9 "$pid" 2>/dev/null; rm -f "$file"
done
exit 0
