#!/usr/bin/env bash
# race_test.sh MPIRUN PROGRAM: ThreadSanitizer reports a missing stream wait, in both stream modes, of eager work and of
# a graph, and nothing else.
set -euo pipefail
mpirun=$1 program=$2
export TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=0 exitcode=66"
export OMPI_MCA_btl=self,vader  # Open MPI's TCP transport locks in two orders, which is reported, too

for streams in threads seed:1; do
  export MINILLM_SIM_STREAMS=$streams
  for ranks in 1 2; do
    for work in eager graph; do
      run=("$mpirun" -np "$ranks" "$program")
      if ! output=$("${run[@]}" wait "$work" 2>&1 </dev/null) || [[ $output == *"data race"* ]]; then
        echo "FAILED: $streams, $ranks ranks, $work, with the wait: $output"
        exit 1
      fi
      if output=$("${run[@]}" no-wait "$work" 2>&1 </dev/null) || [[ $output != *"data race"* ]]; then
        echo "FAILED: $streams, $ranks ranks, $work, without the wait nothing was reported: $output"
        exit 1
      fi
    done
  done
done
