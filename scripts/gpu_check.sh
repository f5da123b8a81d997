#!/usr/bin/env bash
# Everything that only a GPU can tell, in one run with a time budget, for a machine with one NVIDIA GPU and no network.
set -euo pipefail
usage() {
  cat <<'END'
usage: scripts/gpu_check.sh [OPTIONS]                         builds for this machine's GPU and checks
       scripts/gpu_check.sh --build KIT [OPTIONS]             checks what --prepare has put into KIT
       scripts/gpu_check.sh --prepare KIT [--arch 90a] [--prefix DIR]…
       scripts/gpu_check.sh --list | --deps [--prefix DIR]… | --help

  --out DIR          where results go (default: $OUT, or else ./gpu-check-DATE)
  --build KIT        programs made by --prepare, here or on another machine; nothing is compiled
  --prefix DIR       where libraries are also looked for (CLI11, nlohmann/json, GoogleTest, NCCL, …); repeatable
  --stages A,B,…     only these stages; --list tells them. Most need what build leaves in --work; with --build it is added
  --budget SECONDS   for everything together (default 480); a stage gets its own limit or what is left
  --config FILE      what bench, train and pytorch run (default configs/minillm.json)
  --work DIR         keeps the build folder there, for another run (default: a temporary folder)
  --dry-run          prints what each stage would run
  --deps             prints what a build and the stages need, and what of it is here
  --prepare KIT      needs nvcc, but no GPU: builds all programs for --arch (90a, 100, …) and puts them into KIT with the
                     libraries they need, Open MPI included. KIT is a new folder, or a file that ends in .tar.gz or
                     .tar.xz: a quarter of the size, and tar and gzip, or xz, unpack it. It can travel to any path of
                     another machine, which provides the driver, cuBLASLt and NCCL (those of PyTorch's packages will
                     do; without NCCL only what needs several ranks is left out)

Results: summary.txt and summary.json, rewritten after every stage; log.txt, everything that was printed; bench.json,
train.jsonl, compare.json and compare_compiled.json where their stages got that far. A stage that fails or runs out of
time does not stop the next one. "partly" is a stage of which something failed and the rest is good, "incomplete" one
whose tools ran out of time and had found nothing. Returns 0 when no stage failed, not even partly, 1 when one did, 2 for
a wrong command line.
END
}

scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/lib/setup.sh
source "$scripts/lib/setup.sh"
# shellcheck source=scripts/lib/gpu_check/runner.sh
source "$scripts/lib/gpu_check/runner.sh"
# shellcheck source=scripts/lib/gpu_check/toolchain.sh
source "$scripts/lib/gpu_check/toolchain.sh"
# shellcheck source=scripts/lib/gpu_check/kit.sh
source "$scripts/lib/gpu_check/kit.sh"

usage_error() {
  printf 'gpu_check.sh: %s. See --help\n' "$*" >&2
  exit 2
}
absolute() { if [[ $1 == /* ]]; then echo "$1"; else echo "$PWD/$1"; fi; }
folder() { # OPTION DIR: as an absolute path; it must exist
  [[ -d $2 ]] || usage_error "$1: there is no folder '$2'"
  absolute "$2"
}

mode=check out=${OUT:-} budget=480 chosen="" work="" build="" arch="" prepared=""
export GPU_CHECK_PREFIXES="" GPU_CHECK_CONFIG=$repo_root/configs/minillm.json
while (($# > 0)); do
  option=$1
  case $option in
    -h | --help) usage && exit ;;
    --list | --deps | --dry-run)
      mode=${option#--}
      shift
      continue
      ;;
    --out | --build | --prefix | --stages | --budget | --config | --work | --prepare | --arch) ;;
    *) usage_error "no option '$option'" ;;
  esac
  (($# >= 2)) || usage_error "$option needs a value"
  value=$2
  shift 2
  case $option in
    --out) out=$value ;;
    --build)
      [[ -e $value ]] || usage_error "--build: there is no '$value'"
      build=$(absolute "$value")
      ;;
    --prefix) GPU_CHECK_PREFIXES+=$(folder --prefix "$value")$'\n' ;;
    --stages) chosen=$value ;;
    --budget)
      [[ $value =~ ^[1-9][0-9]{0,4}$ ]] || usage_error "--budget must be a number of seconds from 1 to 99999, not '$value'"
      budget=$value
      ;;
    --config)
      [[ -f $value ]] || usage_error "--config: there is no file '$value'"
      GPU_CHECK_CONFIG=$(absolute "$value")
      ;;
    --work) work=$(absolute "$value") ;;
    --prepare) mode=prepare prepared=$(absolute "$value") ;;
    --arch)
      [[ $value =~ ^[1-9][0-9]{1,2}[af]?$ ]] || usage_error "--arch must be one such as 80, 90a or 120, not '$value'"
      arch=$value
      ;;
  esac
done
[[ $mode != prepare || -z $build ]] || usage_error "--prepare makes what --build uses: give one of them"
if [[ -n $build && -n $chosen ]]; then
  chosen+=,build  # takes no time then, and the others need what it finds
fi
select_stages "$chosen"

case $mode in
  list)
    list_stages
    exit
    ;;
  deps)
    print_dependencies
    exit
    ;;
esac

if [[ -n $work ]]; then
  mkdir -p "$work"
  trap 'end_run' EXIT
else
  work=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check.XXXXXX")
  trap 'end_run; rm -rf "$work"' EXIT
fi
export GPU_CHECK_WORK=$work GPU_CHECK_ARCH=$arch GPU_CHECK_ROOT=$repo_root GPU_CHECK_PREBUILT="" GPU_CHECK_DRY=""
export GPU_CHECK_KIT=$work/kit GPU_CHECK_OUT=""

if [[ $mode == prepare ]]; then
  prepare_kit "$prepared"
  exit
fi
if [[ -n $build ]]; then
  unpack_kit "$build"
  GPU_CHECK_PREBUILT=yes
fi
if [[ $mode == dry-run ]]; then
  dry_run
  exit
fi
if [[ -z $out ]]; then
  out=gpu-check-$(date +%Y-%m-%d-%H%M%S)
fi
GPU_CHECK_OUT=$(absolute "$out")
mkdir -p "$GPU_CHECK_OUT"
check "$budget"
