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
