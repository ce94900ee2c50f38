# An attempt that ends before its ranks are there is its node's fault: the job goes elsewhere. FOLDER is set above.
trap : TERM USR2 CONT            # survive the signals meant for the ranks: what comes after them must still run
trap 'cannot_begin $?' EXIT
umask 077
JOB=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}   # never SLURM_JOB_ID: the last task's is the whole array's
HOST=${SLURMD_NODENAME:-$(hostname)}
MAX_STARTS=3 MAX_RESTARTS=20     # how often a job is queued again whose attempts can't begin, or whose end can't be recorded

show_job() { SLURM_TIME_FORMAT=%s timeout 20 scontrol show job -o "$JOB" 2>/dev/null; }
field() { sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<< " $2"; }                                     # field NAME JOB

requeue() {                      # requeue NODES: queue the job again, away from NODES (with commas; - for none)
  local pause words excluded
  excluded=$(field ExcNodeList "$(show_job)")      # as long as the job runs: it must not lose those of its submission
  for pause in 0 5 15 30; do
    sleep "$pause"
    words=$(timeout 20 scontrol requeue "$JOB" 2>&1) && { avoid "$1" "$excluded"; return; }
    case $words in *contact* | *"imed out"* | "") ;; *) break ;; esac                         # a controller may come back
  done
  echo "plimsoll: scontrol requeue $JOB failed: $words; use python -m jobs resubmit" >&2
}

avoid() {                        # avoid NODES EXCLUDED: exclude NODES as well, while enough others are left
  local all known left
  [ "$1" != - ] || return 0
  case $2 in "" | "(null)") all=$1 ;; *) all=$2,$1 ;; esac
  known=$(timeout 20 sinfo -h -N ${SLURM_JOB_PARTITION:+-p "$SLURM_JOB_PARTITION"} -o %N | sort -u)
  left=$(grep -vxcFf <(scontrol show hostnames "$all") <<< "$known")
  if [ -n "$known" ] && [ "$left" -lt "$SLURM_JOB_NUM_NODES" ]; then
    echo "plimsoll: $1 is not excluded: $left other nodes are left, $SLURM_JOB_NUM_NODES wanted" >&2
    return
  fi
  timeout 20 scontrol update JobId="$JOB" ExcNodeList="$all"                                  # only a pending job takes it
}

cannot_begin() {                 # cannot_begin EXIT_CODE: the script ends, and no attempt has been recorded
  trap '' TERM USR2 CONT
  trap - EXIT
  local starts=$FOLDER/cannot_begin_$SLURM_ARRAY_TASK_ID
  echo "$(date +%FT%T) $HOST: exit code $1" >> "$starts"
  echo "plimsoll: no attempt could begin on $HOST (exit code $1)" >&2
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_RESTARTS" ] || [ "$(cat "$starts" 2>/dev/null | wc -l)" -gt "$MAX_STARTS" ]; then
    echo "plimsoll: too often; what could not begin: $starts" >&2
  else
    case $(field JobState "$(show_job)") in RUNNING | SIGNALING | STOPPED | "") requeue "$HOST" ;; esac
  fi
  exit 1
}

setup_failed() {                 # setup_failed EXIT_CODE LINE: a setup line failed, and not within a script of its own
  [ "${#BASH_SOURCE[@]}" -le 2 ] || return 0
  local line; line=$(sed -n "$2p" "$0")
  echo "plimsoll: the setup line failed with exit code $1: $line (append '|| true' where that may be)" >&2
  exit "$1"
}

leave() { trap - EXIT; exit "$1"; }
