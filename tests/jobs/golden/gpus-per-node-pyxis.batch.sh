#!/bin/bash

# Parameters
#SBATCH --array=0-6%3
#SBATCH --export=ALL
#SBATCH --gpus-per-node=4
#SBATCH --job-name=s1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output='/runs/a sweep/.submitit/b/%A_%a_0_log.out'
#SBATCH --requeue
#SBATCH --signal=USR2@180
#SBATCH --time=90
#SBATCH --wckey=plimsoll

# setup
FOLDER='/runs/a sweep/.submitit/b'
export PLIMSOLL_LAUNCH=000000000000
PYTHON=/opt/python
export PLIMSOLL_ROLLOUT_NODES=0
export WANDB_RUN_GROUP=s1
record() { srun --overlap --nodes=1 --ntasks=1 --container-image='nvcr.io#x/plimsoll:1' --container-mounts='/data/it'"'"'s:/data/it'"'"'s,/models:/models,/runs/a sweep/code/c0de:/runs/a sweep/code/c0de:ro' --container-workdir="$RUN" --no-container-mount-home --container-env=PLIMSOLL_CACHE,HF_HOME,TRITON_CACHE_DIR,TORCH_EXTENSIONS_DIR,XDG_CACHE_HOME,PYTHONNOUSERSITE,PYTHONSAFEPATH,CUDA_VISIBLE_DEVICES bash "$FOLDER/task.sh" "$PYTHON" -m jobs.attempt "$@"; }   # a short process, in the image if there is one
# The life of one attempt, outside the image. FOLDER and PYTHON are set above; Submitit's command (srun) follows below.
trap : TERM USR2 CONT            # survive the signals meant for the ranks: what comes after them must still run
umask 077
for name in ${!SRUN_*} ${!SLURM_CPU_BIND*} ${!SLURM_MEM_BIND*} SLURM_HINT; do unset "$name"; done   # leaked from a shell
export SLURM_EXPORT_ENV=ALL      # srun: a site's --export=NONE would leave the ranks no PATH and no secrets
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK                     # srun inherits it no more
JOB=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}   # never SLURM_JOB_ID: the last task's is the whole array's
RUN=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$FOLDER/runs.txt")
export PLIMSOLL_SLURM=1 PLIMSOLL_JOB=$JOB PLIMSOLL_RUN=$RUN
# The ranks meet at the first node's address: its Slurm name need not resolve.
MASTER_ADDR=$(timeout 20 scontrol show node "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" |
  sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
[ -z "$MASTER_ADDR" ] && unset MASTER_ADDR || export MASTER_ADDR
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1         # neither ~/.local nor the current folder may shadow the snapshot
cd "$RUN" || exit 1

requeue() {
  local pause words
  for pause in 0 5 15 30; do
    sleep "$pause"
    words=$(timeout 20 scontrol requeue "$JOB" 2>&1) && return
    case $words in *contact* | *"imed out"* | "") ;; *) break ;; esac                         # a controller may come back
  done
  echo "plimsoll: scontrol requeue $JOB failed: $words; use python -m jobs resubmit" >&2
}

finish() {                       # finish EXIT_CODE: note the attempt, then queue the job again or stop
  trap '' TERM USR2 CONT
  local code=$1 seen state answer verdict cause nodes
  answer="stop unknown -"
  seen=$(SLURM_TIME_FORMAT=%s timeout 20 scontrol show job -o "$JOB" 2>/dev/null)
  state=$(sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p' <<< "$seen")
  [ "$code" != 85 ] || [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ] || answer="requeue unknown -"    # if the next line fails
  answer=$(record end "$RUN" --exit-code "$code" --evidence "$seen" --bad-node "$BAD_NODE" || echo "$answer")
  read -r verdict cause nodes <<< "$answer"
  case $verdict:$state:$cause in                  # in any other state Slurm has queued it again itself
    requeue:RUNNING:* | requeue:SIGNALING:* | requeue:STOPPED:* | requeue::* | requeue:*:timeout)
      requeue
      [ "$nodes" = - ] || timeout 20 scontrol update JobId="$JOB" ExcNodeList="$nodes" ;;       # only a pending job takes it
  esac
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
[ "$PLIMSOLL_ATTEMPT" != stop ] || exit 1
export PLIMSOLL_ATTEMPT LOGS=$RUN/logs/attempt_$PLIMSOLL_ATTEMPT

srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --output="$LOGS/health.log" bash "$FOLDER/health.sh" "$RUN"
code=$?
BAD_NODE=$(sed -n 's/^BAD \([^ :]*\):.*/\1/p' "$LOGS/health.log" | sort -u | paste -sd,)
case $code in 77 | 140 | 143) finish "$code" ;; esac   # unfit, or already asked to stop

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --kill-on-bad-exit=1 --wait=60 --output="$LOGS/rank_%t.log" --open-mode=append --container-image='nvcr.io#x/plimsoll:1' --container-mounts='/data/it'"'"'s:/data/it'"'"'s,/models:/models,/runs/a sweep/code/c0de:/runs/a sweep/code/c0de:ro' --container-workdir="$RUN" --no-container-mount-home --container-env=PLIMSOLL_CACHE,HF_HOME,TRITON_CACHE_DIR,TORCH_EXTENSIONS_DIR,XDG_CACHE_HOME,PYTHONNOUSERSITE,PYTHONSAFEPATH,CUDA_VISIBLE_DEVICES bash "$FOLDER/task.sh" /opt/python -u -m submitit.core._submit '/runs/a sweep/.submitit/b'


# teardown
finish $?