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

pids() {
  sed -n 's/^pid //p' "$log"
}

# continue_ranks JOB RANKS: lets ranks that have stopped go on after twice the watchdog's time limit.
continue_ranks() {
  local pid
  until [[ $(for pid in $(pids); do grep '^State:.*T' "/proc/$pid/status"; done | wc -l) == "$2" ]]; do
    kill -0 "$1" || return 0
    sleep 0.1
  done
  sleep 2
  for pid in $(pids); do kill -CONT "$pid"; done
}

# run MODE RANKS CODE [TEXT]: the job must end with CODE, have printed TEXT, and be gone within 5 s of what was planted
# (1 s of it is the watchdog's time limit).
run() {
  local mode=$1 ranks=$2 code=$3 text=${4-} rc=0 pid planted
  : >"$log"
  timeout -k 5 60 "$mpirun" -np "$ranks" "$program" "$mode" >"$log" 2>&1 </dev/null &
  local job=$!
  [[ $mode != pause ]] || continue_ranks "$job" "$ranks"
  wait "$job" || rc=$?
  local ended
  ended=$(date +%s)
  [[ $rc == "$code" ]] || fail "$mode: exit code $rc, not $code"
  [[ -z $text ]] || grep -qE "$text" "$log" || fail "$mode: no '$text'"
  [[ $(pids | wc -l) == "$ranks" ]] || fail "$mode: not $ranks ranks"
  for pid in $(pids); do
    # A zombie has ended; who reaps it is not ours to say.
    [[ ! -d /proc/$pid ]] || grep -q '^State:.*Z' "/proc/$pid/status" || fail "$mode: process $pid still runs"
  done
  planted=$(sed -n 's/^planted at //p' "$log" | sort -n | tail -1)
  [[ -z $planted ]] || ((ended - planted <= 5 + 1)) || fail "$mode: took $((ended - planted)) s to end"
  echo "$mode on $ranks ranks: passed"
}

waiting='watchdog: no progress for 1 s in the test: another rank has failed or is stopped'
run healthy 3 0
run pause 3 0
run stop 3 86 "^\[rank [02]\] $waiting"
run mismatch 3 86 '^\[rank [0-2]\] watchdog: communicator watched failed: .*collective #2: rank 0 calls ncclAllReduce of 8 fp32, rank 1 calls ncclAllReduce of 4 fp32'
for ranks in 2 3; do
  for mode in init register destroy; do
    run "$mode" "$ranks" 86 "^\[rank [02]\] $waiting"
  done
done
