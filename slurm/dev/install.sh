#!/bin/bash
# install.sh [--if-possible]: the packages of the one-machine development cluster, on Debian or Ubuntu, as root. Does nothing
# when they are there. With --if-possible a machine where it can't is told about and no error: the tests skip there.
set -euo pipefail
missing=""
for tool in slurmctld slurmd slurmdbd sbatch munged mariadbd; do
  command -v "$tool" >/dev/null 2>&1 || [ -x "/usr/sbin/$tool" ] || missing="$missing $tool"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "no Slurm here (missing:$missing), and only root on Debian can install it" >&2
  [ "${1:-}" = --if-possible ]; exit
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client slurmdbd munge mariadb-server >/dev/null
