# shellcheck shell=bash
# Sourced: where this machine keeps what a build and the stages need. Prefixes come first, then CUDA's folder, the system,
# and the packages that PyTorch's Python brings along (cuBLASLt and NCCL are there where they are nowhere else).

# run COMMAND…: shows it first; shows it only with --dry-run
run() {
  { printf '+' && printf ' %q' "$@" && echo; }
  [[ -n $GPU_CHECK_DRY ]] || "$@"
}

prefixes() { printf '%s' "$GPU_CHECK_PREFIXES"; }

cuda_home() {
  local nvcc
  if nvcc=$(command -v nvcc); then
    dirname -- "$(dirname -- "$(readlink -f -- "$nvcc")")"
  elif [[ -d ${CUDA_HOME:-/usr/local/cuda} ]]; then
    echo "${CUDA_HOME:-/usr/local/cuda}"
  fi
}

# Folders of nvidia's packages: …/nvidia/nccl, …/nvidia/cu13, …
python_packages() {
  local folder
  python3 -c 'import sysconfig; print("\n".join({*map(sysconfig.get_path, ("purelib", "platlib"))}))' 2>/dev/null |
    while read -r folder; do
      printf '%s\n' "$folder"/nvidia/*/
    done
}

roots() {
  prefixes
  cuda_home
  printf '%s\n' /usr/local /usr
  python_packages
}

# find_library NAME…: the first path of a library with one of these names
find_library() {
  local root folder name
  while read -r root; do
    for folder in lib64 lib "lib/$(uname -m)-linux-gnu" "targets/$(uname -m)-linux/lib"; do
      for name in "$@"; do
        if [[ -e $root/$folder/$name ]]; then
          echo "${root%/}/$folder/$name"
          return
        fi
      done
    done
  done < <(roots)
  return 1
}

find_header() { # NAME: the folder to include
  local root
  while read -r root; do
    if [[ -e $root/include/$1 ]]; then
      echo "${root%/}/include"
      return
    fi
  done < <(roots)
  return 1
}

# The folder of a CMake package's configuration file.
find_package() { # NAME
  local root found
  while read -r root; do
    found=$(find "$root"/{lib,lib64,share}/{,*/}cmake/"$1"* -maxdepth 1 -iname "$1*config.cmake" 2>/dev/null |
      grep -m 1 . || true)
    if [[ -n $found ]]; then
      dirname -- "$found"
      return
    fi
  done < <(prefixes && printf '%s\n' /usr/local /usr)
  return 1
}

find_program() { # NAME
  local root
  while read -r root; do
    if [[ -x $root/bin/$1 ]]; then
      echo "$root/bin/$1"
      return
    fi
  done < <(prefixes)
  command -v "$1" && return
  for root in "$(cuda_home)"/{bin,"$1"}; do # compute-sanitizer has a folder of its own there
    if [[ -x $root/$1 && ! -d $root/$1 ]]; then
      echo "$root/$1"
      return
    fi
  done
  return 1
}

# What nvcc calls the GPU: 90a for compute capability 9.0, whose own instructions only the "a" target has.
gpu_architecture() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d ' .')
  [[ $capability =~ ^[0-9]+$ ]] || return 1
  if [[ $capability == 90 ]]; then echo 90a; else echo "$capability"; fi
}

# The version, or why there is none. Importing it takes seconds.
pytorch_version() {
  local found
  found=$(timeout 20 python3 -c '
import torch, safetensors
if not torch.cuda.is_available(): raise SystemExit("PyTorch finds no GPU")
print(torch.__version__)' 2>&1 | tail -n 1 || true)
  echo "${found:-it does not load within 20 s}"
}
is_version() { [[ $1 =~ ^[0-9]+\.[0-9] ]]; }

# dependency NAME WHAT_FOR FIND…: prints a line; what a build lacks is added to missing_for_build
dependency() {
  local name=$1 what=$2 found
  shift 2
  if found=$("$@"); then
    printf '  found    %-17s %-25s %s\n' "$name" "$what" "$(head -n 1 <<<"$found")"
  else
    printf '  MISSING  %-17s %s\n' "$name" "$what"
    [[ $what != build ]] || missing_for_build+=("$name")
  fi
}

list_build_dependencies() {
  missing_for_build=()
  dependency nvcc build find_program nvcc
  dependency g++ build command -v g++
  dependency cmake build command -v cmake
  dependency ninja build command -v ninja
  dependency CLI11 build find_package CLI11
  dependency nlohmann/json build find_package nlohmann_json
  dependency NCCL build find_library libnccl.so libnccl.so.2
  dependency nccl.h build find_header nccl.h
  dependency cuBLASLt build find_library libcublasLt.so libcublasLt.so.13
  dependency GoogleTest "tests, sanitizer" find_package GTest
  dependency MPI "shared, ranks, parity" find_program mpicxx
}

list_dependencies() {
  local version
  version=$(pytorch_version)
  list_build_dependencies
  dependency mpirun ranks find_program mpirun
  dependency nvidia-smi "facts, build: which GPU" command -v nvidia-smi
  dependency compute-sanitizer sanitizer find_program compute-sanitizer
  if is_version "$version"; then
    dependency PyTorch pytorch echo "$version"
  else
    dependency PyTorch "pytorch: $version" false
  fi
}

print_dependencies() {
  list_dependencies
  if ((${#missing_for_build[@]} > 0)); then
    printf 'A build is not possible: %s. Give --prefix, or --build with what --prepare made elsewhere\n' \
      "${missing_for_build[*]}"
    return 1
  fi
  echo "A build is possible"
}
