# Is this node fit? Run once per node before the trainer. Prints "BAD <node>: why" and exits 77 when it isn't.
bad() { echo "BAD ${SLURMD_NODENAME:-$(hostname)}: $*"; exit 77; }
free_gb() { df -Pk "$1" 2>/dev/null | awk 'NR == 2 {printf "%.3f", $4 / 1048576}'; }
size_gb() { df -Pk "$1" 2>/dev/null | awk 'NR == 2 {printf "%.3f", $2 / 1048576}'; }
less() { awk -v a="${1:-0}" -v b="$2" 'BEGIN {exit !(a + 0 < b + 0)}'; }

for folder in /tmp "$1"; do
  less "$(free_gb "$folder")" "$MIN_DISK_GB" && bad "$(free_gb "$folder") GB free in $folder, $MIN_DISK_GB GB wanted"
done
probe="$1/.probe-${SLURMD_NODENAME:-$(hostname)}"
{ : > "$probe"; } 2>/dev/null && rm -f "$probe" || bad "cannot write to the run folder $1: is it mounted here?"
less "$(size_gb /dev/shm)" "$MIN_SHM_GB" && bad "/dev/shm has $(size_gb /dev/shm) GB, $MIN_SHM_GB GB wanted"

if [ "$GPUS" -gt 0 ]; then
  ask() { timeout 30 nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits; }
  seen=$(ask index) || bad "nvidia-smi failed or hung"
  count=$(wc -l <<< "$seen"); [ "$count" -ge "$GPUS" ] || bad "$count GPUs, $GPUS wanted"
  ecc=$(ask ecc.errors.uncorrected.volatile.total | awk '$1 ~ /^[0-9]+$/ {n += $1} END {print n + 0}')
  [ "$ecc" = 0 ] || bad "$ecc uncorrected ECC errors"
  # Only this job's GPUs: others may share the node.
  mine=,${CUDA_VISIBLE_DEVICES:-$(paste -sd, <<< "$seen")},
  while IFS=', ' read -r index free; do
    [[ $mine == *,$index,* ]] || continue
    less "$((free / 1024))" "$MIN_GPU_FREE_GB" && bad "GPU $index has $free MiB free, $MIN_GPU_FREE_GB GB wanted"
  done <<< "$(ask index,memory.free)"
fi
echo "OK ${SLURMD_NODENAME:-$(hostname)}"
