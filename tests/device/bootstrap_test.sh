#!/usr/bin/env bash
# bootstrap_test.sh PROGRAM: a lone process that its launcher meant to be one of several refuses to run.
set -euo pipefail
program=$1
unset SLURM_NTASKS WORLD_SIZE OMPI_COMM_WORLD_SIZE PMI_SIZE

# expect CODE TEXT [VARIABLE=VALUE]
expect() {
  local code=$1 text=$2 rc=0 output
  shift 2
  output=$(env "$@" "$program" 2>&1 </dev/null) || rc=$?
  if [[ $rc != "$code" || $output != *"$text"* ]]; then
    echo "FAILED ($*): exit code $rc, output: $output"
    exit 1
  fi
}

expect 0 "rank 0 of 1"
expect 0 "rank 0 of 1" PMI_SIZE=1
expect 0 "rank 0 of 1" WORLD_SIZE=1
for variable in SLURM_NTASKS WORLD_SIZE PMI_SIZE; do
  expect 86 "($variable=4), but this process sees only itself" "$variable=4"
done
