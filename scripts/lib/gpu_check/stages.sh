#!/usr/bin/env bash
# stages.sh NAME: one stage of gpu_check.sh, which exports what is used here (GPU_CHECK_*), limits the time and keeps the
# output. The last thing written to WORK/note is the stage's remark in the summary. Returns 0; 77 for
# skipped; 78 for incomplete: nothing failed, but a tool ran out of time; 79 for partly: some of it failed; else failed.
set -euo pipefail
scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/lib/setup.sh
source "$scripts/lib/setup.sh"
# shellcheck source=scripts/lib/gpu_check/toolchain.sh
source "$scripts/lib/gpu_check/toolchain.sh"
# shellcheck source=scripts/lib/gpu_check/kit.sh
source "$scripts/lib/gpu_check/kit.sh"
# The checkout may be read-only.
export PYTHONDONTWRITEBYTECODE=1
cd -- "$repo_root"

kit=$GPU_CHECK_KIT work=$GPU_CHECK_WORK out=$GPU_CHECK_OUT config=$GPU_CHECK_CONFIG in_kit=$GPU_CHECK_WORK/in_kit
small=$repo_root/configs/quickstart.json
dry=$GPU_CHECK_DRY

remark() { printf '%s' "$*" >"$work/note"; }
skip() {
  remark "$*"
  echo "skipped: $*"
  exit 77
}
fail() {
  remark "$*"
  echo "failed: $*"
  exit 1
}
incomplete() {
  remark "$*"
  echo "incomplete: $*"
  exit 78
}
partly() {
  remark "$*"
  echo "partly failed: $*"
  exit 79
}

# Parts of a stage
# ----------------------------------------------------------------------------------------------------------------------

# part NAME LIMIT COMMAND…: runs it, adds "STATUS SECONDS NAME" to WORK/results and the output to the log in one piece
part() {
  local name=$1 limit=$2 status=0 start=$SECONDS file=$work/each/$1.running
  shift 2
  if [[ -n $dry ]]; then
    run "$@"
    return
  fi
  mkdir -p "$work/each"
  timeout -k 2 "$limit" "$@" >"$file" 2>&1 </dev/null || status=$?
  {
    printf -- '---- %s: exit code %d, %d s: ' "$name" "$status" $((SECONDS - start))
    printf ' %q' "$@"
    echo
    if ((status == 0)); then tail -n 3 "$file"; else tail -n 200 "$file"; fi
  } >"$file.log"
  # Parts that run at once must not mix their lines.
  flock "$work/each" cat "$file.log"
  mv "$file" "${file%.running}.ended"
  printf '%d %d %s\n' "$status" $((SECONDS - start)) "$name" >>"$work/results"
}

# beside NUMBER NAME LIMIT COMMAND…: a part, while fewer than NUMBER others run
beside() {
  local most=$1
  shift
  if [[ -n $dry ]]; then
    part "$@"
    return
  fi
  while (($(jobs -rp | wc -l) >= most)); do
    wait -n || true
  done
  part "$@" &
}

# parts_that CONDITION: names of parts for which it holds (awk; $1 is the exit code), with what the code says
parts_that() {
  awk '{ why = $1 == 124 ? "ran out of time" : $1 == 137 ? "killed" : "exit code " $1 }
    '"$1"' { print $3 " (" why ")" }' "$work/results" | sort | paste -sd , | sed 's/,/, /g'
}

# conclude WHAT [tools]: after all parts; fails, as a whole or partly, when one has. A tool that ran out of time has found
# nothing wrong, and leaves the stage incomplete.
conclude() {
  [[ -z $dry ]] || return 0
  wait
  # shellcheck disable=SC2016  # awk's
  local all bad text slow="" late='$1 == 124 || $1 == 137'
  all=$(wc -l <"$work/results")
  if [[ ${2-} == tools ]]; then
    bad=$(parts_that "\$1 != 0 && !($late)") slow=$(parts_that "$late")
  else
    bad=$(parts_that "\$1 != 0")
  fi
  if [[ -n $bad ]]; then
    text="$1: of $all failed $bad${slow:+; unfinished are $slow}"
    ! grep -q '^0 ' "$work/results" || partly "$text"
    fail "$text"
  fi
  [[ -z $slow ]] || incomplete "$1: of $all none failed, unfinished are $slow"
  remark "$1: all $all passed"
}

need_kit() {
  [[ -n $dry ]] || [[ -x $in_kit && -x $kit/minillm ]] || skip "there are no programs: the build stage gave none"
}

mpi_run() { # RANKS COMMAND…: through in_kit, whose mpirun it is
  printf '%s\0' "$in_kit" "$repo_root/scripts/mpirun.sh" -np "$@"
}

# Stages
# ----------------------------------------------------------------------------------------------------------------------

show() { # COMMAND…: of a tool that may be missing
  echo "+ $*"
  "$@" 2>&1 || true
}

facts_of_gpu='product name|version|compute|mig|ecc mode|current *:|clocks|graphics|sm  |memory|power|total|slowdown'

stage_facts() {
  local gpu driver arch nvcc facts
  [[ -z $dry ]] || { run nvidia-smi -q && return; }
  gpu=$(nvidia-smi --query-gpu=name,memory.total --format=csv,noheader 2>/dev/null | head -n 1 || true)
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
  arch=$(gpu_architecture || true)
  nvcc=$(have_nvcc && nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p' || echo none)
  printf '%s=%s\n' gpu "$gpu" driver "$driver" arch "$arch" nvcc "$nvcc" cpus "$(nproc)" commit "$(commit)" >"$work/machine"
  cat "$work/machine"
  show uname -a
  show free -g
  show nvidia-smi
  show nvidia-smi -q | grep -iE "^\\+|$facts_of_gpu" || true
  show g++ --version | head -n 2
  show cmake --version | head -n 2
  list_dependencies
  [[ ! -f $kit/kit.txt ]] || show cat "$kit/kit.txt"
  (($(gpu_count) > 0)) || fail "nvidia-smi lists no GPU"
  check_driver "$driver" "$nvcc"
  [[ -z $GPU_CHECK_PREBUILT ]] || check_libraries
  facts="$gpu, driver $driver, nvcc $nvcc, $(nproc) processors"
  if without_nccl; then
    facts+="; libnccl.so.2 is found nowhere (--prefix): one rank goes on without, tests that call it are left out"
  fi
  remark "$facts"
}

# check_driver DRIVER NVCC: programs of a CUDA run on any driver for the same major version
check_driver() {
  local programs=$2 runs
  [[ -z $GPU_CHECK_PREBUILT ]] || programs=$(kit_fact nvcc)
  runs=$(nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA[A-Za-z ]* Version: *([0-9]+\.[0-9]+).*/\1/p' | head -n 1)
  [[ $programs =~ ^[0-9]+\. && -n $runs ]] || return 0
  ((${runs%%.*} >= ${programs%%.*})) ||
    fail "driver $1 runs programs of CUDA $runs and older, and these are made with CUDA $programs: install a newer driver, or \
make them with CUDA ${runs%%.*}"
}

# What the prepared programs need and nothing here has.
check_libraries() {
  local lost
  lost=$(write_launchers | paste -sd ' ')
  [[ -z $lost ]] || fail "found nowhere: $lost; give --prefix with the folder above their lib (the packages of PyTorch's \
Python have cuBLASLt and NCCL)"
}

target_architecture() {
  local arch=${GPU_CHECK_ARCH:-$(gpu_architecture || true)}
  if [[ -z $arch && -n $dry ]]; then
    arch=native
  fi
  [[ -n $arch ]] || fail "nvidia-smi does not tell the GPU's compute capability; give --arch"
  echo "$arch"
}

stage_build() {
  local arch built status=0
  if [[ -n $GPU_CHECK_PREBUILT ]]; then
    built=$(kit_fact arch) arch=$(gpu_architecture || true)
    [[ -x $kit/minillm ]] || fail "$kit holds no minillm: make it with --prepare"
    [[ -z $arch || $arch == "$built" || $built == sim ]] || fail "$kit is for sm_$built, this GPU is sm_$arch"
  else
    list_build_dependencies
    [[ -n $dry ]] || ((${#missing_for_build[@]} == 0)) ||
      fail "missing ${missing_for_build[*]}; give --prefix, or --build with what --prepare made"
    arch=$(target_architecture)
    build_program "$arch"
  fi
  if [[ -z $dry ]]; then
    check_libraries
    run "$work/minillm" --version
  fi
  # From here on the stages that need no tests can do their work, whatever happens.
  [[ -n $GPU_CHECK_PREBUILT ]] || build_tests || status=$?
  [[ -z $dry ]] || return 0
  built=$(find "$kit" -maxdepth 1 -name '*_test' | wc -l)
  ((status == 0)) || partly "minillm is built, and of the tests $built programs, but not everything"
  remark "$("$work/minillm" --version) for sm_$(kit_fact arch), $built test programs, MPI: $(kit_fact mpi)"
}

stage_tests() {
  local program most left_out=""
  local -a programs
  need_kit
  mapfile -t programs < <(compgen -G "$kit/*_test" || true)
  ((${#programs[@]} > 0)) || [[ -n $dry ]] || skip "there are no test programs: the build found no GoogleTest"
  [[ -z $dry || ${#programs[@]} -gt 0 ]] || echo "+ each test program that the build makes"
  # The host's float64 loops take most of the time.
  most=$(($(nproc) < 6 ? $(nproc) : 6))
  for program in "${programs[@]}"; do
    if without_nccl && needs_nccl "$program"; then
      left_out+=" $(basename -- "$program")"
      continue
    fi
    beside "$most" "$(basename -- "$program")" 75 "$in_kit" "$program" --gtest_brief=1
  done
  [[ -n $dry || -x $kit/parity_test ]] || echo "parity_test is not there: it is built with MPI only"
  conclude "test programs"
  [[ -z $left_out ]] || remark "$(cat "$work/note"); left out, since NCCL is not there:$left_out"
}

# What the tools look at: every kind of kernel once, small. Instrumented kernels take ten to a hundred times their time.
sanitizer_programs=(
  "kernels_attention_test *MatchesFloat64*:*Trap26*" "kernels_rmsnorm_test *MatchesFloat64*" "kernels_ptx_test *"
  "kernels_cross_entropy_test *MatchesFloat64*:*Misaligned*" "kernels_embedding_test *BackwardAdds*:*Forward*"
  "kernels_reduction_test *MatchesFloat64*" "kernels_bias_gradient_test *MatchesFloat64*"
  "kernels_adamw_test *MatchesFloat64*" "kernels_rope_test *MatchesFloat64*" "kernels_silu_test *MatchesFloat64*"
)

stage_sanitizer() {
  local sanitizer tool entry program probe=$work/probe
  need_kit
  sanitizer=$(find_program compute-sanitizer) || [[ -n $dry ]] || skip "compute-sanitizer not found"
  sanitizer=${sanitizer:-compute-sanitizer}
  if [[ -z $dry ]]; then
    [[ -x $kit/memory_test ]] || skip "there are no test programs"
    # Where the GPU is passed through, the tool may refuse it.
    timeout -k 2 30 "$in_kit" "$sanitizer" "$kit/memory_test" --gtest_filter='Stream.*' >"$probe" 2>&1 </dev/null || true
    ! grep -q 'Device not supported' "$probe" || skip "compute-sanitizer: Device not supported"
  fi
  # In the order of what they find; the last ones are what a short time leaves out.
  for tool in memcheck racecheck synccheck initcheck; do
    for entry in "${sanitizer_programs[@]}"; do
      program=${entry%% *}
      [[ -x $kit/$program || -n $dry ]] || continue
      beside 5 "$tool.$program" 45 "$in_kit" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
        "$kit/$program" --gtest_brief=1 --gtest_filter="${entry#* }"
    done
  done
  conclude checks tools
}

stage_bench() {
  need_kit
  if [[ -z $dry ]]; then
    "$work/minillm" --help | grep -qE '^ +bench\b' || skip "this minillm has no command bench"
  fi
  run "$work/minillm" bench "$config" --json "$out/bench.json"
  [[ -n $dry ]] || [[ -s $out/bench.json ]] || fail "minillm bench wrote no JSON"
  remark "bench.json"
}

# values KEY FILE: those of a key in metrics.jsonl, one a line
values() { sed -n "s/.*\"$1\":\([^,}]*\).*/\1/p" "$2"; }

median_of_last() { values "$1" "$2" | tail -n 10 | sort -g | sed -n 5p; } # ten steps

stage_train() {
  local steps=20 graphs=0 file=$work/train/metrics.jsonl graph=$work/graph/metrics.jsonl eager
  need_kit
  rm -rf "$work/train" "$work/graph"
  run "$work/minillm" train "$config" --set "train.steps=$steps" --set 'checkpoint.dir=""' --log-dir "$work/train"
  run "$work/minillm" train "$config" --set "train.steps=$steps" --set 'checkpoint.dir=""' --log-dir "$work/graph" \
    --set train.cuda_graph=true || graphs=$?
  [[ -z $dry ]] || return 0
  cp "$file" "$out/train.jsonl"
  [[ $(wc -l <"$file") == "$steps" ]] || fail "metrics.jsonl has $(wc -l <"$file") steps instead of $steps"
  ! grep -qE '"loss":null|"skipped":true' "$file" || fail "a loss or a gradient norm is not finite"
  # Of the last steps: the first ones choose matrix products and warm up.
  eager="loss $(values loss "$file" | sed -n '1p') to $(values loss "$file" | tail -n 1), median of the last ten steps \
$(median_of_last step_s "$file") s, $(median_of_last tokens_per_s_per_gpu "$file") tokens/s, \
peak $(values peak_vram_bytes "$file" | tail -n 1) bytes"
  ((graphs == 0)) || partly "$eager; with train.cuda_graph exit code $graphs"
  [[ $(values loss "$file") == "$(values loss "$graph")" ]] || partly "$eager; losses differ with train.cuda_graph"
  remark "$eager, as a CUDA graph $(median_of_last step_s "$graph") s"
}

stage_shared() {
  local arch
  if [[ -n $GPU_CHECK_PREBUILT ]]; then
    [[ -x $kit/shared/minillm ]] || skip "--build has none: it was prepared without MPI"
    remark "$(find "$kit/shared" ! -type d | wc -l) programs, prepared"
    return
  fi
  need_kit
  [[ -n $dry ]] || kit_has_mpi || skip "MPI not found"
  arch=$(target_architecture)
  build_shared "$arch"
  remark "$(find "$kit/shared" ! -type d 2>/dev/null | wc -l) programs"
}

# A small model on random tokens, which need no text on this machine. The global batch is the same for 1, 2 and 4 ranks.
train_small() { # RANKS
  local setting
  local -a command
  mapfile -d '' -t command < <(mpi_run "$1" "$kit/shared/minillm" train "$small" --log-dir "$work/ranks.$1")
  for setting in train.steps=5 train.seq_len=64 "train.micro_batch=$((4 / $1))" train.optimizer.lr=1e-3 \
    precision.param=fp32 data.source=random 'data.path=""' 'checkpoint.dir=""'; do
    command+=(--set "$setting")
  done
  part "train.$1" 30 "${command[@]}"
}

# Sums over ranks in another order change the last digits; tests/distributed allows losses the same. AdamW hides a wrong
# scale of the gradients, their norm shows it.
stage_losses_agree() { # FILE FILE: not a stage, but a part
  paste -d ' ' <(values loss "$1") <(values loss "$2") <(values grad_norm "$1") <(values grad_norm "$2") | awk '
    function distance(a, b) { return a > b ? a - b : b - a }
    { for (i = 1; i <= 4; i++) if ($i !~ /^[0-9.e+-]+$/) { print "step " NR - 1 ": no number in: " $0; bad = 1 } }
    distance($1, $2) > loss { loss = distance($1, $2) }
    distance($3, $4) > norm * $3 { norm = distance($3, $4) / $3 }
    END {
      printf "%d steps, losses differ by %g at most, gradient norms by a part of %g\n", NR, loss, norm
      exit NR != 5 || bad || loss > 1e-4 || norm > 1e-4
    }'
}

stage_ranks() {
  local ranks program
  local -a command programs
  need_kit
  [[ -n $dry || -x $kit/shared/minillm ]] || skip "there are no programs for ranks that share a GPU (MPI not found)"
  [[ -n $dry ]] || "$in_kit" bash -c 'command -v mpirun' >/dev/null || skip "mpirun not found"
  rm -rf "$work"/ranks.*
  for ranks in 1 2 4; do
    train_small "$ranks"
  done
  for ranks in 2 4; do
    part "losses.$ranks" 5 bash "${BASH_SOURCE[0]}" losses_agree "$work/ranks.1/metrics.jsonl" \
      "$work/ranks.$ranks/metrics.jsonl"
  done
  mapfile -t programs < <(compgen -G "$kit/shared/*_test" || true)
  for program in "${programs[@]}"; do
    for ranks in 2 4; do
      # Written for two and three.
      [[ $ranks == 2 || $program != */@(mismatch|shard_executor)_test ]] || ranks=3
      mapfile -d '' -t command < <(mpi_run "$ranks" "$program" --gtest_brief=1)
      part "$(basename -- "$program").$ranks" 45 "${command[@]}"
    done
  done
  conclude "runs on 2 and 4 ranks"
}

# compare JSON TIMEOUT OPTION: minillm and one peer; returns what compare_pytorch.py does, which writes what it has
compare() {
  run python3 "$repo_root/scripts/compare_pytorch.py" "$config" --steps 20 --device cuda --minillm "$work/minillm" \
    "$3" --timeout "$2" --json "$out/$1"
}

# torch.compile makes C programs and compiles them.
have_c_compiler() { [[ -n ${CC-} ]] || command -v gcc || command -v clang; }

stage_pytorch() {
  local version eager=0 compiled=0
  need_kit
  version=$(pytorch_version)
  [[ -n $dry ]] || is_version "$version" || skip "no PyTorch with CUDA and safetensors: $version"
  # The compiled peer has a comparison of its own: it may take all the time that is left, and the other figures are there.
  compare compare.json 60 --no-compile || eager=$?
  if ! have_c_compiler >/dev/null; then
    ((eager == 0)) || fail "PyTorch $version: the comparison with the eager peer returns $eager"
    remark "PyTorch $version: compare.json; the compiled peer is left out: there is no C compiler"
    return
  fi
  compare compare_compiled.json $((GPU_CHECK_LIMIT - SECONDS - 30)) --compile || compiled=$?
  case $((eager != 0))$((compiled != 0)) in
    00) remark "PyTorch $version: compare.json, compare_compiled.json" ;;
    01) partly "PyTorch $version: compare.json; the comparison with the compiled peer returns $compiled" ;;
    10) partly "PyTorch $version: compare_compiled.json; the comparison with the eager peer returns $eager" ;;
    11) fail "PyTorch $version: the comparisons return $eager and, compiled, $compiled" ;;
  esac
}

"stage_$1" "${@:2}"
