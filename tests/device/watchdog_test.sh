#!/usr/bin/env bash
# watchdog_test.sh MPIRUN PROGRAM: a broken rank ends the job, with exit code 86, the cause, and nothing left running.
set -euo pipefail
mpirun=$1 program=$2
log=$(mktemp)
trap 'rm -f "$log"' EXIT

fail() {
  echo "FAILED: $*"
  cat "$log"
  exit 1
}

# run MODE CODE [TEXT]: the job must end with CODE, have printed TEXT, and be gone within 5 s of what was planted
# (1 s of it is the watchdog's time limit).
run() {
  local mode=$1 code=$2 text=${3-} rc=0 pid planted
  timeout -k 5 60 "$mpirun" -np 3 "$program" "$mode" >"$log" 2>&1 </dev/null || rc=$?
  local ended
  ended=$(date +%s)
  [[ $rc == "$code" ]] || fail "$mode: exit code $rc, not $code"
  [[ -z $text ]] || grep -qE "$text" "$log" || fail "$mode: no '$text'"
  [[ $(grep -c '^pid ' "$log") == 3 ]] || fail "$mode: not three ranks"
  for pid in $(sed -n 's/^pid //p' "$log"); do
    # A zombie has ended; who reaps it is not ours to say.
    [[ ! -d /proc/$pid ]] || grep -q '^State:.*Z' "/proc/$pid/status" || fail "$mode: process $pid still runs"
  done
  planted=$(sed -n 's/^planted at //p' "$log" | sort -n | tail -1)
  [[ -z $planted ]] || ((ended - planted <= 5 + 1)) || fail "$mode: took $((ended - planted)) s to end"
  echo "$mode: passed"
}

run healthy 0
run stop 86 '^\[rank [02]\] watchdog: no progress for 1 s in the test: another rank has failed or is stopped'
run mismatch 86 '^\[rank [0-2]\] watchdog: communicator watched failed: .*collective #2: rank 0 calls ncclAllReduce of 8 fp32, rank 1 calls ncclAllReduce of 4 fp32'
