#!/bin/bash

# Parameters
#SBATCH --account=a1
#SBATCH --array=0-6%3
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --export=ALL
#SBATCH --gres=gpu:h100:8
#SBATCH --job-name=s1
#SBATCH --mem=512000MB
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output='/runs/a sweep/.submitit/b/%A_%a_0_log.out'
#SBATCH --partition=gpu
#SBATCH --qos=normal
#SBATCH --requeue
#SBATCH --reservation=r1
#SBATCH --signal=USR2@180
#SBATCH --time=90
#SBATCH --wckey=plimsoll

# setup
FOLDER='/runs/a sweep/.submitit/b'
export PLIMSOLL_LAUNCH=000000000000
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
PYTHON=python3
export PLIMSOLL_ROLLOUT_NODES=1
export WANDB_RUN_GROUP=s1
trap 'setup_failed $? $LINENO' ERR
module load apptainer
trap - ERR
IMAGE='/images/plimsoll v1.sif'
IMAGE_DIGEST=sha256:d1
IMAGE_FILE='7 1.500000000'
record() { bash "$FOLDER/task.sh" "$PYTHON" -m jobs.attempt "$@"; }   # a short process, in the image if there is one
# The life of one attempt, outside the image. FOLDER and PYTHON are set above; Submitit's command (srun) follows below.
for name in ${!SRUN_*} ${!SLURM_CPU_BIND*} ${!SLURM_MEM_BIND*} SLURM_HINT; do unset "$name"; done   # leaked from a shell
export SLURM_EXPORT_ENV=ALL      # srun: a site's --export=NONE would leave the ranks no PATH and no secrets
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK                     # srun inherits it no more
RUN=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$FOLDER/runs.txt")
export PLIMSOLL_SLURM=1 PLIMSOLL_JOB=$JOB PLIMSOLL_RUN=$RUN
# The ranks meet at the first node's address: its Slurm name need not resolve.
MASTER_ADDR=$(timeout 20 scontrol show node "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" |
  sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
[ -z "$MASTER_ADDR" ] && unset MASTER_ADDR || export MASTER_ADDR
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1         # neither ~/.local nor the current folder may shadow the snapshot
[ -n "$RUN" ] && cd "$RUN" || exit 1

node_states() {                  # lines NODE STATE: what Slurm says of the job's nodes, and "silent" where nothing starts
  local node
  timeout 20 sinfo -h -N -n "$SLURM_JOB_NODELIST" -o "%N %T" 2>/dev/null
  [ "$SLURM_JOB_NUM_NODES" -gt 1 ] || return 0
  for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    timeout 30 srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --output=/dev/null true 2>/dev/null || echo "$node silent" &
  done
  wait
}

finish() {                       # finish EXIT_CODE: note the attempt, then queue the job again or stop
  trap '' TERM USR2 CONT
  trap - EXIT
  local code=$1 seen state answer verdict cause nodes states=""
  seen=$(show_job)
  state=$(field JobState "$seen")
  # if the next line fails: what the ranks recorded decides, and the node is to blame
  answer="requeue unknown $HOST"
  [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ] || answer="stop unknown -"
  [ "$code" != 85 ] || answer=${answer% *}" -"
  ! grep -qs '"kind": "user_error"' "$LOGS"/rank_*.end.json || answer="stop error -"
  if grep -qs '"kind": "finished"' "$LOGS/rank_0.end.json"; then answer="stop done -"
  elif [ "$code" != 85 ]; then states=$(node_states); fi
  answer=$(record end "$RUN" --exit-code "$code" --evidence "$seen" --nodes "$states" --bad-node "$BAD_NODE" || echo "$answer")
  read -r verdict cause nodes <<< "$(tail -n 1 <<< "$answer")"
  case $verdict:$state:$cause in                  # in any other state Slurm has queued it again itself
    requeue:RUNNING:* | requeue:SIGNALING:* | requeue:STOPPED:* | requeue::* | requeue:*:timeout) requeue "$nodes" ;;
  esac
  [ "$cause" != "done" ] || exit 0                # whatever srun says
  [ "$code" != 0 ] || code=1
  exit "$code"
}

changed_image() {                # its digest when its file is not the one of submit; of many GB, so size and time come first
  [ -n "$IMAGE_FILE" ] && [ "$(stat -Lc '%s %.9Y' "$IMAGE" 2>/dev/null)" != "$IMAGE_FILE" ] || return
  local now=sha256:
  now+=$(sha256sum < "$IMAGE" | cut -d' ' -f1)
  [ "$now" = "$IMAGE_DIGEST" ] || echo "$now"
}

before=""
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] ||
  before=$(SLURM_TIME_FORMAT=%s timeout 20 sacct -D -X -n -P -j "$JOB" -o State,ExitCode,NodeList,End 2>/dev/null)
image=$(changed_image)
[ -z "$image" ] || export PLIMSOLL_IMAGE_DIGEST=$image
PLIMSOLL_ATTEMPT=$(trap '' TERM USR2 CONT; record begin "$RUN" --evidence "$before" --image "$image") || exit 1
case $PLIMSOLL_ATTEMPT in done) leave 0 ;; stop) leave 1 ;; "" | *[!0-9]*) exit 1 ;; esac
export PLIMSOLL_ATTEMPT LOGS=$RUN/logs/attempt_$PLIMSOLL_ATTEMPT

srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --output="$LOGS/health.log" bash "$FOLDER/health.sh" "$RUN"
code=$?
BAD_NODE=$(sed -n 's/^BAD \([^ :]*\):.*/\1/p' "$LOGS/health.log" | sort -u | paste -sd,)
case $code in 77 | 140 | 143) finish "$code" ;; esac   # unfit, or already asked to stop
[ "$code" = 0 ] || [ "$(grep -cs '^OK ' "$LOGS/health.log")" = "$SLURM_JOB_NUM_NODES" ] || finish "$code"   # a node is lost

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --kill-on-bad-exit=1 --wait=60 --output="$LOGS/rank_%t.log" --open-mode=append --mpi=none bash "$FOLDER/task.sh" python3 -u -m submitit.core._submit '/runs/a sweep/.submitit/b'


# teardown
finish $?