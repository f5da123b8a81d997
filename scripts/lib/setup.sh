# shellcheck shell=bash
# Sourced by the scripts: what a build needs, which build this machine gets, and how to make it.
#
#   require_packages GROUP…      finds what is missing (build, lint, fresh), installs it as root on Debian, otherwise says
#                                what to ask for
#   choose_preset                prints cuda with nvcc and a GPU, sim elsewhere
#   build_preset NAME [TARGET…]  configures and builds build/NAME: everything, or some targets
#
# Everything is looked for where it is used (commands on PATH, headers and libraries by the compiler), not in the
# package database: libraries from modules or from source count as well.

repo_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
# bash has a default PATH that programs started by it do not see.
export PATH

note() { printf '==> %s\n' "$*"; }
die() {
  printf '%s: %s\n' "$(basename -- "$0")" "$*" >&2
  exit 1
}

# nvcc is often installed but not on PATH.
if ! command -v nvcc >/dev/null && [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; then
  PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
fi
have_nvcc() { command -v nvcc >/dev/null; }

gpu_count() {
  local gpus=0
  if command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
  fi
  echo "$gpus"
}

job_count() { nproc; }

# missing_packages GROUP…: prints the names of the Debian packages that provide what is not there.
missing_packages() {
  local -A command_of=() uses_of=()
  local group package uses
  for group in "$@"; do
    case $group in
      build)
        command_of+=([g++]=g++ [cmake]=cmake [ninja-build]=ninja [openmpi-bin]=mpirun)
        uses_of+=(
          [libcli11-dev]="CLI/CLI.hpp"
          [nlohmann-json3-dev]="nlohmann/json.hpp"
          [libdnnl-dev]="oneapi/dnnl/dnnl.hpp -ldnnl"
          [ocl-icd-opencl-dev]="CL/cl.h -lOpenCL"  # libdnnl-dev's CMake package wants it and does not depend on it
          [libboost-context-dev]="boost/context/detail/fcontext.hpp -lboost_context"
          [libgtest-dev]="gtest/gtest.h -lgtest"
        )
        builds mpicxx mpi.h || echo libopenmpi-dev
        ;;
      lint)
        command_of+=([clang-format]=clang-format [clang-tidy]=clang-tidy [python3]=python3)
        python3 -c 'import ensurepip' 2>/dev/null || echo python3-venv
        ;;
      fresh) command_of+=([mmdebstrap]=mmdebstrap [git]=git [ccache]=ccache) ;;
      *) die "missing_packages: no group '$group'" ;;
    esac
  done
  for package in "${!command_of[@]}"; do
    command -v "${command_of[$package]}" >/dev/null || echo "$package"
  done
  for package in "${!uses_of[@]}"; do
    read -ra uses <<<"${uses_of[$package]}"
    builds g++ "${uses[@]}" || echo "$package"
  done
}

# builds COMPILER HEADER [LIBRARY]: whether there is a header of that name, and a program can be linked to the library. A
# header alone says too little: libboost-dev has those of libraries that are in packages of their own.
builds() {
  local program status=0
  program=$(mktemp)
  printf '#if !__has_include(<%s>)\n#error\n#endif\nint main() {}\n' "$2" |
    "$1" -x c++ - -o "$program" "${@:3}" &>/dev/null || status=$?
  rm -f "$program"
  return "$status"
}

# require_packages GROUP…
require_packages() {
  local missing log
  mapfile -t missing < <(missing_packages "$@" | sort)
  if ((${#missing[@]} == 0)); then
    return
  fi
  if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    die "missing: ${missing[*]}
Ask the administrator for these Debian packages (or what provides the same):
  apt-get install ${missing[*]}"
  fi
  note "installing ${missing[*]}"
  log=$(mktemp)
  export DEBIAN_FRONTEND=noninteractive
  if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } &>"$log" </dev/null; then
    tail -n 20 "$log" >&2
    die "apt-get could not install ${missing[*]}; its messages are above, all of them in $log"
  fi
  rm -f "$log"
}

choose_preset() {
  local gpus
  gpus=$(gpu_count)
  if have_nvcc && ((gpus > 0)); then
    note "preset cuda: $gpus GPU(s), $(command -v nvcc)" >&2
    echo cuda
    return
  fi
  if ((gpus > 0)); then
    note "preset sim (simulated device): there are $gpus GPU(s), but no nvcc on PATH or in CUDA_HOME" >&2
  else
    note "preset sim (simulated device): nvidia-smi lists no GPU" >&2
  fi
  echo sim
}

# build_preset NAME [TARGET…]
build_preset() {
  local name=$1 ninja_options=()
  shift
  # On a terminal ninja overwrites one line; in a log it would leave one per file.
  [[ -t 1 ]] || ninja_options=(--quiet)
  (
    cd -- "$repo_root" || exit
    if command -v ccache >/dev/null; then
      export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
      # What was compiled in one checkout serves another, wherever it is, and with any language of the messages.
      export CCACHE_BASEDIR=$repo_root CCACHE_NOHASHDIR=1
      unset LANG LC_ALL LC_CTYPE LC_MESSAGES
    fi
    cmake --preset "$name" --log-level=WARNING
    cmake --build --preset "$name" --target "${@:-all}" --parallel "$(job_count)" -- "${ninja_options[@]}"
  )
}
