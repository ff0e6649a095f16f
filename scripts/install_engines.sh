#!/usr/bin/env bash
# Installs the programs of the system's packages that tests/engines drives, where this may be done: as root, on Debian.
set -euo pipefail
declare -A packages=([slurmctld]=slurm-wlm [munged]=munge [promtool]=prometheus [ip]=iproute2 [curl]=curl [kubectl]=kubernetes-client)
missing=()
for program in "${!packages[@]}"; do
  PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "not installed: ${missing[*]} (their tests are skipped)" >&2
  exit 0
fi
# No service of theirs starts: the tests start what they need.
policy=/usr/sbin/policy-rc.d
[ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod +x "$policy"; trap 'rm -f "$policy"' EXIT; }
apt-get update -qq
wanted=()
for program in "${missing[@]}"; do
  # That of Debian 12, 1.20, cannot read deploy/kubernetes.
  if [ "$program" = kubectl ] && ! dpkg --compare-versions "$(apt-cache show --no-all-versions kubernetes-client 2>/dev/null | sed -n 's/^Version: //p')" ge 1.29; then
    echo "not installed: kubectl (its package is older than 1.29; its tests are skipped)" >&2
  else
    wanted+=("${packages[$program]}")
  fi
done
DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null
