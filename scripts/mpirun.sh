#!/usr/bin/env bash
# mpirun for one machine, as it has to be called anywhere: as root (containers), with more ranks than cores, where the
# kernel forbids one process to read another's memory, and with an empty environment. Arguments go to mpirun.
set -euo pipefail
export PATH  # without one in the environment bash has a default, which it keeps to itself
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_btl_base_warn_component_unused=0
export OMPI_MCA_orte_base_help_aggregate=0 OMPI_MCA_orte_abort_on_non_zero_status=1
# mpirun asks hwloc about the machine, which would look for GPUs at the X displays 0 to 9 and wait for each.
export HWLOC_COMPONENTS=${HWLOC_COMPONENTS--gl}
# Open MPI wants a remote shell to exist even where it starts nothing remotely.
if ! command -v ssh >/dev/null && ! command -v rsh >/dev/null; then
  export OMPI_MCA_plm_rsh_agent=true
fi
exec mpirun "$@"
