#!/usr/bin/env bash
# bootstrap_test.sh PROGRAM WITH_MPI: a process that no launcher started needs nothing of MPI; one that its launcher
# meant to be one of several refuses to run alone; an MPI that cannot start is a failed communication.
set -euo pipefail
program=$1 with_mpi=$2

# What the build itself needs of the environment.
kept=()
for variable in LD_LIBRARY_PATH ASAN_OPTIONS TSAN_OPTIONS UBSAN_OPTIONS; do
  if [[ -v $variable ]]; then
    kept+=("$variable=${!variable}")
  fi
done

# expect CODE TEXT [VARIABLE=VALUE…]: with these variables and no others.
expect() {
  local code=$1 text=$2 rc=0 output
  shift 2
  output=$(env -i "${kept[@]}" "$@" "$program" 2>&1 </dev/null) || rc=$?
  if [[ $rc != "$code" || $output != *"$text"* ]]; then
    echo "FAILED ($*): exit code $rc, output: $output"
    exit 1
  fi
}

no_mpi=(OMPI_MCA_btl=none_such TMPDIR=/nonexistent)
expect 0 "rank 0 of 1" "${no_mpi[@]}"
# An allocation of Slurm for one task, and an interactive step in it.
expect 0 "rank 0 of 1" "${no_mpi[@]}" SLURM_NTASKS=1 SLURM_PROCID=0
expect 0 "rank 0 of 1" "${no_mpi[@]}" SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1
expect 0 "rank 0 of 1" "${no_mpi[@]}" WORLD_SIZE=1
# A batch script or a shell in an allocation for several, and torchrun.
for variable in SLURM_NTASKS WORLD_SIZE; do
  expect 86 "($variable=4), but this process sees only itself" "${no_mpi[@]}" "$variable=4" SLURM_PROCID=0
done

# Open MPI, where it starts alone, wants a remote shell to exist.
mpi=(PATH="$PATH" OMPI_MCA_plm_rsh_agent=true)
expect 0 "rank 0 of 1" "${mpi[@]}" PMI_SIZE=1
for variable in OMPI_COMM_WORLD_SIZE PMI_SIZE; do
  expect 86 "($variable=4), but this process sees only itself" "${mpi[@]}" "$variable=4"
done
expect 86 "(SLURM_NTASKS=4), but this process sees only itself" "${mpi[@]}" SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4
if ((with_mpi)); then
  for variable in OMPI_COMM_WORLD_SIZE=1 PMIX_RANK=0 PMI_RANK=0 SLURM_STEP_NUM_TASKS=4; do
    expect 86 "error: MPI could not start" "${no_mpi[@]}" "$variable"
  done
fi
