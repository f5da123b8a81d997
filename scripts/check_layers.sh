#!/usr/bin/env bash
# The include rule: folders include their own headers and those of folders below them, nothing else.
set -euo pipefail
usage() {
  cat <<'EOF'
usage: scripts/check_layers.sh [ROOT]

Checks every #include of a project header under ROOT/src and ROOT/kernels (ROOT: this checkout). From top to bottom:

  app  train  data  checkpoint  profile  model  shard  comm  cuda  kernels  config  core

A folder may include itself and what is to its right, except that kernels/ includes only core/ and kernels/. The
simulated device (src/sim) is found through its headers' vendor names: only src/sim and
kernels/device/{launch,shared,ptx}.h may name it, and of the project it includes only core/. Nothing but tests
includes tests/.

Prints each offender as file:line: what is wrong, and returns 1 when there are any.
EOF
}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  -h | --help)
    usage
    exit
    ;;
esac
if (($# > 1)) || [[ $# == 1 && ! -d $1 ]]; then
  usage >&2
  exit 2
fi
cd -- "${1:-$root}"
if [[ ! -d src || ! -d kernels ]]; then
  echo "check_layers.sh: $PWD has no src/ and kernels/: not the root of a checkout" >&2
  exit 2
fi

find src kernels -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 | sort -z |
  xargs -0 awk -f "$root/scripts/lib/check_layers.awk" || exit 1
