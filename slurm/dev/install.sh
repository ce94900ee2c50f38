#!/bin/bash
# install.sh: the packages of the one-machine development cluster, on Debian or Ubuntu, as root. Does nothing when present.
set -euo pipefail
missing=""
for tool in slurmctld slurmd slurmdbd sbatch munged mariadbd; do
  command -v "$tool" >/dev/null 2>&1 || [ -x "/usr/sbin/$tool" ] || missing="$missing $tool"
done
[ -n "$missing" ] || exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "missing:$missing; install Slurm, munge and MariaDB" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client slurmdbd munge mariadb-server >/dev/null
