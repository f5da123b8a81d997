#!/usr/bin/env bash
# Builds and tests. Every stage runs, also after one has failed; the summary is the last thing printed.
set -euo pipefail
usage() {
  cat <<'EOF'
usage: scripts/test.sh [--full | --smoke]

Installs what is missing (as root), builds the sim preset and runs all tests with ctest.

  --full   also: the include rule, clang-format and clang-tidy; the tests of what runs on a device under
           AddressSanitizer (sim-asan) and ThreadSanitizer (sim-tsan); every parser on mutated input for a minute;
           everything compiled by nvcc for sm_80, 90a, 100 and 120 (cuda), the tests on the GPU where there is one,
           and the rules for the machine code (sass_report.py); both README commands in a new Debian (fresh.sh)
  --smoke  a handful of tests only, and only what they need is built: training under mpirun, and the scripts

Ends with the time of each stage and ctest's totals of each preset. Returns 1 when anything failed.
EOF
}

# shellcheck source=scripts/lib/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/setup.sh"

full=false
tests=()    # what ctest is told beside the preset: which tests; all if empty
targets=()  # what is built: everything if empty
for argument in "$@"; do
  case $argument in
    -h | --help)
      usage
      exit
      ;;
    --full) full=true ;;
    --smoke)
      targets=(minillm cli_test)
      tests=(--tests-regex '^Train\.|^scripts\.' --exclude-regex '^scripts\.gpu_check$')
      ;;
    *) die "no option '$argument'. See --help" ;;
  esac
done
if $full && ((${#tests[@]} > 0)); then
  die "--full and --smoke: one or the other"
fi

# Formatting and checks differ between versions of LLVM; this is the one that the sources were written with.
llvm_version=14
cd -- "$repo_root"
summary=()
totals=()
failed=false
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# stage NAME COMMAND…: runs it, remembers time and outcome in summary, failed and status. Not to be called in a condition:
# that would switch off `set -e` inside COMMAND.
stage() {
  local name=$1 start=$SECONDS outcome=ok
  shift
  note "$name"
  set +e
  (
    set -e
    "$@"
  )
  status=$?
  set -e
  if ((status != 0)); then
    outcome=FAILED
    failed=true
  fi
  summary+=("$(printf '%-8s %4d s  %s' "$outcome" $((SECONDS - start)) "$name")")
}

skip() { # NAME WHY
  note "$1: not done, $2"
  summary+=("$(printf '%-8s %4s    %s: %s' "not done" "" "$1" "$2")")
}

run_tests() { # PRESET
  ctest --preset "$1" "${tests[@]}" --parallel "$(job_count)" --output-on-failure --no-tests=error 2>&1 | tee "$logs/$1"
}

test_preset() { # PRESET
  stage "build $1" build_preset "$1" "${targets[@]}"
  if ((status != 0)); then
    skip "test $1" "it did not build"
    totals+=("$1: no tests ran: it did not build")
    return
  fi
  stage "test $1" run_tests "$1"
  totals+=("$1: $(grep 'tests passed' "$logs/$1" || echo "ctest gave no totals")")
}

# Each parser on more mutations than its test has time for.
run_fuzzers() {
  ASAN_OPTIONS=detect_leaks=0 xargs -P "$(job_count)" -d '\n' -I{} bash -c '{} --seconds 60' \
    <build/sim-asan/tests/fuzz/commands
}

fuzz_stage() {
  if [[ -f build/sim-asan/tests/fuzz/commands ]]; then
    stage "fuzz, a minute each" run_fuzzers
  else
    skip "fuzz" "sim-asan is not configured"
  fi
}

sources() { # PATTERN FOLDER…
  local pattern=$1
  shift
  find "$@" -type f -regex ".*\.\($pattern\)" -print0 | sort -z
}

check_format() {
  sources 'h\|cpp\|cu' src kernels tests | xargs -0 clang-format --dry-run --Werror
}

# The count of warnings in system headers that clang-tidy prints for each file is noise.
run_tidy() {
  sources 'cpp' src | timeout 900 xargs -0 -n 1 -P "$(job_count)" clang-tidy -p build/sim --quiet \
    --extra-arg=-include --extra-arg="$repo_root/scripts/lib/source_location.h" \
    2> >(grep -v 'warnings\? generated\.$' >&2)
}

llvm_stage() { # TOOL NAME COMMAND…
  local tool=$1 found
  shift
  found=$("$tool" --version | sed -n 's/.*version \([0-9]*\).*/\1/p' | head -n 1)
  if [[ $found == "$llvm_version" ]]; then
    stage "$@"
  else
    skip "$1" "$tool is version $found, the sources are checked with $llvm_version"
  fi
}

cuda_stages() {
  if ! have_nvcc; then
    skip "build cuda" "there is no nvcc on PATH or in CUDA_HOME"
    skip "machine code" "there is no nvcc"
    return
  fi
  if (($(gpu_count) > 0)); then
    test_preset cuda
  else
    stage "build cuda" build_preset cuda
    skip "test cuda" "nvidia-smi lists no GPU"
  fi
  stage "machine code" scripts/sass_report.py --check
}

fresh_stage() {
  local why
  if why=$(scripts/fresh.sh --check 2>&1); then
    stage "fresh root" scripts/fresh.sh --steps 40
  else
    skip "fresh root" "$(tail -n 1 <<<"$why")"
  fi
}

if $full; then
  require_packages build lint
  # Before anything is compiled: fresh.sh takes it from ccache.
  ((EUID != 0)) || (require_packages fresh) || note "there will be no stage 'fresh root'"
  stage "include rule" scripts/check_layers.sh
  llvm_stage clang-format "clang-format" check_format
else
  require_packages build
fi
test_preset sim
if $full; then
  if [[ -f build/sim/compile_commands.json ]]; then
    llvm_stage clang-tidy "clang-tidy" run_tidy
  fi
  test_preset sim-asan
  fuzz_stage
  test_preset sim-tsan
  cuda_stages
  fresh_stage
fi

printf '\nSummary (%d s)\n' "$SECONDS"
printf '  %s\n' "${summary[@]}"
printf '%s\n' "${totals[@]}"
if $failed; then
  exit 1
fi
