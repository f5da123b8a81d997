#!/usr/bin/env bash
# From a fresh checkout to a model that writes text: installs what is missing, builds, trains, generates.
set -euo pipefail
usage() {
  cat <<'EOF'
usage: scripts/quickstart.sh [RANKS] [TEXT]

Builds minillm, trains a small byte-level model (configs/quickstart.json) with RANKS processes under mpirun and
lets it continue a prompt. Uses the GPUs where there are some, the simulated device elsewhere.

  RANKS   how many processes share the model: 1 or more; with GPUs at most one per GPU
          (default: 2, or 1 on a machine with a single GPU)
  TEXT    what to train on: a file, or a quoted glob such as 'books/*.txt' (default: data.path of the configuration)

The weights are written to runs/quickstart/model.safetensors.
EOF
}

# shellcheck source=scripts/lib/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/setup.sh"

case ${1:-} in
  -h | --help)
    usage
    exit
    ;;
esac
(($# <= 2)) || die "at most two arguments, RANKS and TEXT; got $#. See --help"
ranks=${1:-}
text=${2:-}
if [[ -n $ranks && ! $ranks =~ ^[1-9][0-9]{0,3}$ ]]; then
  die "RANKS must be a whole number from 1 to 9999, not '$ranks'. See --help"
fi
overrides=()
if [[ -n $text ]]; then
  [[ $text == /* ]] || text=$PWD/$text
  # The pattern may hold spaces, which compgen -G keeps together.
  compgen -G "$text" >/dev/null || die "TEXT: no file matches '$text'"
  overrides=(--set "data.path=$text")
fi

preset=$(choose_preset)
gpus=$(gpu_count)
if [[ $preset == cuda ]]; then
  ranks=${ranks:-$((gpus < 2 ? gpus : 2))}
  ((ranks <= gpus)) || die "RANKS is $ranks, but there are $gpus GPU(s), and NCCL needs one for each rank"
else
  ranks=${ranks:-2}
fi

require_packages build
note "building (build/$preset)"
build_preset "$preset" minillm
cd -- "$repo_root"
note "training configs/quickstart.json with $ranks rank(s)"
scripts/mpirun.sh -np "$ranks" "build/$preset/minillm" train configs/quickstart.json "${overrides[@]}"
note "continuing a prompt with runs/quickstart/model.safetensors"
"build/$preset/minillm" generate runs/quickstart/model.safetensors --prompt "The " --tokens 300
