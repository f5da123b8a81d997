#!/usr/bin/env bash
# gpu_check_test.sh BUILD: a rehearsal of scripts/gpu_check.sh where there is no GPU. One run with the programs of BUILD (a
# build for the simulated device) and stand-ins for nvidia-smi, compute-sanitizer and PyTorch; then runs in which every
# program is a stand-in that does what the case needs: fails, hangs, prints other losses.
set -euo pipefail
build=$(cd -- "$1" && pwd)
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
sandbox=$(mktemp -d)
trap 'rm -rf "$sandbox"' EXIT
# A checkout that nothing may be written to, at a path with spaces.
checkout="$sandbox/check out"
tools=$sandbox/tools bare=$sandbox/bare run=0 failures=0
unset OUT

fail() {
  printf 'FAIL: %s\n' "$*" >&2
  failures=$((failures + 1))
}

mkdir -p "$checkout" "$tools" "$bare"
cp -r "$root/scripts" "$root/configs" "$checkout"
chmod -R a-w "$checkout"
touch "$sandbox/before"
# The system's programs without those that a case wants to be missing.
find /usr/bin /bin -maxdepth 1 ! -type d ! -name 'mpi*' ! -name 'nvidia-smi' ! -name 'nvcc' ! -name 'compute-sanitizer' \
  ! -name 'cmake' ! -name 'ninja' ! -name 'python3' -exec ln -sft "$bare" {} +

# Stand-ins
# ----------------------------------------------------------------------------------------------------------------------

write() { # FILE: a program, from stdin
  cat >"$1"
  chmod +x "$1"
}
write "$tools/nvidia-smi" <<'END'
#!/usr/bin/env bash
case $* in
  -L) echo "GPU 0: NVIDIA H200 (UUID: GPU-1)" ;;
  *name,memory*) echo "NVIDIA H200, 143771 MiB" ;;
  *driver_version*) echo 580.1 ;;
  *compute_cap*) echo 9.0 ;;
  *) printf 'Product Name : NVIDIA H200\n| CUDA Version: %s |\n' "${DRIVER_CUDA:-13.1}" ;;
esac
END
write "$tools/compute-sanitizer" <<'END'
#!/usr/bin/env bash
[[ " $ACT " != *" sanitizer=unsupported "* ]] || { echo "========= Error: Device not supported"; exit 1; }
[[ " $ACT " != *" sanitizer=race "* || $* != *racecheck* ]] || { echo "========= ERROR: Race reported"; exit 9; }
[[ " $ACT " != *" sanitizer=slow "* || $* != *initcheck* ]] || exit 124
while [[ $1 == --* ]]; do [[ $1 == --*=* ]] && shift || shift 2; done
exec "$@"
END
write "$tools/python3" <<'END'
#!/usr/bin/env bash
case $* in
  *sysconfig*) ;;
  -c*) [[ " $ACT " != *" torch=none "* ]] || { echo "No module named 'torch'"; exit 1; }; echo 2.11.0 ;;
  *compare_pytorch.py*)
    compiled=$*
    while [[ $1 != --json ]]; do shift; done
    echo '{"compared": true}' >"$2"
    [[ " $ACT " != *" compiled=fail "* || $compiled != *" --compile "* ]] || exit 1
    ;;
esac
END
write "$tools/mpirun" <<'END'
#!/usr/bin/env bash
export RANKS=$2
shift 2
exec "$@"
END
# All test programs and minillm: NAME=fail or NAME=hang in ACT, NAME being minillm.train for a command.
write "$sandbox/actor" <<'END'
#!/usr/bin/env bash
name=${0##*/} steps=0 folder="" offset=0 norm=1
[[ $name != minillm ]] || name=minillm.${1#--}
case " $ACT " in
  *" $name=fail "*) echo "planted failure" >&2; exit 1 ;;
  *" $name=hang "*) trap '' TERM; setsid sleep "$NAP" & sleep "$NAP" ;;
esac
[[ " $ACT " != *" losses=drift "* || ${RANKS-} != 4 ]] || offset=1
[[ " $ACT " != *" norms=drift "* || ${RANKS-} != 2 ]] || norm=2
case $name in
  minillm.version) echo "minillm stand-in" ;;
  minillm.help) printf '  train  Trains\n  bench  Measures\n' ;;
  minillm.bench) while [[ $1 != --json ]]; do shift; done; echo '{"rows": []}' >"$2" ;;
  minillm.train)
    [[ " $ACT " != *" graph=fail "* || " $* " != *" train.cuda_graph=true "* ]] || exit 1
    loss=4.${offset}00
    [[ " $ACT " != *" losses=nan "* ]] || loss=null
    [[ " $ACT " != *" losses=graph "* || " $* " != *" train.cuda_graph=true "* ]] || loss=4.001
    while (($# > 0)); do
      case $1 in --log-dir) folder=$2 ;; train.steps=*) steps=${1#*=} ;; esac
      shift
    done
    mkdir -p "$folder"
    for ((i = 0; i < steps; i++)); do
      printf '{"step":%d,"loss":%s,"peak_vram_bytes":1,"step_s":0.5,"tokens_per_s_per_gpu":10,' $i $loss
      printf '"grad_norm":%s,"skipped":false}\n' $norm
    done >"$folder/metrics.jsonl"
    ;;
esac
END

stand_in_kit() { # MPI: "$kit" of stand-ins, yes with those for several ranks
  rm -rf "$kit"
  mkdir -p "$kit"
  printf 'arch=90a\nmpi=%s\n' "$1" >"$kit/kit.txt"
  local program
  for program in minillm kernels_silu_test kernels_rope_test memory_test gemm_test parity_test; do
    ln -s "$sandbox/actor" "$kit/$program"
  done
  [[ $1 == yes ]] || { rm "$kit/parity_test" && return; }
  mkdir "$kit/shared"
  ln -s "$sandbox/actor" "$kit/shared/minillm"
  ln -s "$sandbox/actor" "$kit/shared/collectives_test"
}

# Runs and expectations
# ----------------------------------------------------------------------------------------------------------------------

# gpu_check CODE ARGUMENT…: from another folder; results in $out, what it printed in $out.printed
gpu_check() {
  local code=$1 status=0
  shift
  run=$((run + 1)) out=$place/out.$run
  (cd / && PATH=${path:-$tools:$bare} CUDA_HOME=${cuda:-$sandbox/none} ACT=${act-} NAP=${nap-} TMPDIR=$sandbox \
    "$checkout/scripts/gpu_check.sh" --out "$out" "$@") >"$out.printed" 2>&1 || status=$?
  [[ $status == "$code" ]] || fail "run $run ($*): exit code $status, not $code: $(cat "$out.printed")"
}
says() { # TEXT: the summary has it, without the seconds of stages
  sed -E 's/^(ok|partly|FAILED|incomplete) +[0-9]+ s +/\1 /; s/ +/ /g' "$out/summary.txt" | grep -qF -- "$1" ||
    fail "run $run: no '$1' in: $(cat "$out/summary.txt")"
}
json_says() {
  grep -qF -- "$1" "$out/summary.json" || fail "run $run: no '$1' in: $(cat "$out/summary.json")"
}
gone() { # TEXT: no process has it in its command line
  local file
  for file in /proc/[0-9]*/cmdline; do
    if { tr '\0' ' ' <"$file"; } 2>/dev/null | grep -qE "^sleep $1 "; then
      fail "run $run: a process still runs: $file"
    fi
  done
}

test_real_programs() {
  mkdir -p "$kit/shared"
  printf 'arch=sim\nmpi=yes\n' >"$kit/kit.txt"
  ln -s "$build"/tests/kernels/kernels_{cast,silu,rope}_test "$build"/tests/device/{memory,collectives}_test "$kit"
  ln -s "$build/tests/device/collectives_test" "$build/minillm" "$kit/shared"
  # Measuring needs a GPU; the rest of minillm is real.
  write "$kit/minillm" <<END
#!/usr/bin/env bash
case \$1 in
  bench | --help) exec "$place/actor/minillm" "\$@" ;;
  *) exec "$build/minillm" "\$@" ;;
esac
END
  mkdir -p "$place/actor"
  ln -sf "$sandbox/actor" "$place/actor/minillm"
  local small="$place/a model.json" name
  cat >"$small" <<'END'
{"model": {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 64},
 "train": {"micro_batch": 1, "seq_len": 16}, "data": {"source": "random"}}
END
  # The real mpirun, and no other python3 than the stand-in.
  mkdir -p "$place/mpi"
  ln -sf "$(command -v mpirun)" "$place/mpi/mpirun"
  path=$place/mpi:$tools:$bare gpu_check 0 --build "$kit" --config "$small"
  for name in facts build tests sanitizer bench train shared ranks pytorch; do
    says "ok $name"
  done
  says "9 ok, 0 partly, 0 failed, 0 incomplete, 0 skipped of 9 stages"
  says "facts: NVIDIA H200, 143771 MiB, driver 580.1"
  says "test programs: all 5 passed"
  says "runs on 2 and 4 ranks: all 7 passed"
  grep -qE "5 steps, losses differ by [0-9.e-]+ at most, gradient norms by a part of [0-9.e-]+$" "$out/log.txt" || fail "the losses were not compared"
  json_says '"result": "ok"'
  [[ $(wc -l <"$out/train.jsonl") == 20 ]] || fail "train.jsonl has not 20 steps"
  # Who copies results has few files to copy.
  [[ $(cd "$out" && echo *) == "bench.json compare.json compare_compiled.json log.txt summary.json summary.txt train.jsonl" ]] ||
    fail "files: $(ls "$out")"
  if command -v python3 >/dev/null; then
    python3 -m json.tool "$out/summary.json" >/dev/null || fail "summary.json is no JSON"
  fi
}

test_failures() {
  stand_in_kit yes
  act="gemm_test=fail minillm.bench=fail sanitizer=race losses=drift compiled=fail" gpu_check 1 --build "$kit"
  says "partly tests: test programs: of 5 failed gemm_test (exit code 1)"
  says "partly sanitizer: checks: of 8 failed racecheck.kernels_rope_test (exit code 9), racecheck.kernels_silu_test (exit code 9)"
  says "FAILED bench: exit code 1: planted failure"
  says "train: loss 4.000 to 4.000"
  says "partly ranks: runs on 2 and 4 ranks: of 7 failed losses.4 (exit code 1)"
  says "partly pytorch: PyTorch 2.11.0: compare.json; the comparison with the compiled peer returns 1"
  says "4 ok, 4 partly, 1 failed, 0 incomplete, 0 skipped of 9 stages"
  json_says '"name": "tests", "result": "partly"'
  json_says '"result": "failed"'
  grep -q "planted failure" "$out/log.txt" || fail "the log has not what the program printed"
  act="norms=drift" gpu_check 1 --build "$kit" --stages build,ranks
  says "of 7 failed losses.2 (exit code 1)"
  act="losses=nan" gpu_check 1 --build "$kit" --stages build,ranks,train
  says "of 7 failed losses.2 (exit code 1), losses.4 (exit code 1)"
  says "train: a loss or a gradient norm is not finite"
  act="losses=graph" gpu_check 1 --build "$kit" --stages build,train
  says "partly train: loss 4.000 to 4.000"
  says "; losses differ with train.cuda_graph"
  act="graph=fail" gpu_check 1 --build "$kit" --stages build,train
  says "; with train.cuda_graph exit code 1"
  act="sanitizer=slow" gpu_check 0 --build "$kit" --stages build,sanitizer
  says "incomplete sanitizer: checks: of 8 none failed, unfinished are initcheck.kernels_rope_test (ran out of time), initcheck"
  says "1 ok, 0 partly, 0 failed, 1 incomplete, 0 skipped of 2 stages"
  act="sanitizer=slow sanitizer=race" gpu_check 1 --build "$kit" --stages build,sanitizer
  says "racecheck.kernels_silu_test (exit code 9); unfinished are initcheck.kernels_rope_test (ran out of time)"
}

test_what_is_missing() {
  stand_in_kit no
  mkdir "$place/few"
  cp "$tools"/{nvidia-smi,python3} "$place/few"
  path=$place/few:$bare act="torch=none" gpu_check 0 --build "$kit"
  says "sanitizer: compute-sanitizer not found"
  says "shared: --build has none: it was prepared without MPI"
  says "ranks: there are no programs for ranks that share a GPU (MPI not found)"
  says "pytorch: no PyTorch with CUDA and safetensors: No module named 'torch'"
  says "5 ok, 0 partly, 0 failed, 0 incomplete, 4 skipped of 9 stages"
  act="sanitizer=unsupported" gpu_check 0 --build "$kit" --stages sanitizer
  says "sanitizer: compute-sanitizer: Device not supported"
  path=$bare gpu_check 1 --build "$kit" --stages facts
  says "facts: nvidia-smi lists no GPU"
  cp -r "$bare" "$place/no compiler"
  rm -f "$place/no compiler/"{gcc,clang}
  path=$tools:"$place/no compiler" gpu_check 0 --build "$kit" --stages build,pytorch
  says "ok pytorch: PyTorch 2.11.0: compare.json; the compiled peer is left out: there is no C compiler"
  echo nvcc=13.0 >>"$kit/kit.txt"
  DRIVER_CUDA=12.4 gpu_check 1 --build "$kit" --stages facts
  says "facts: driver 580.1 runs programs of CUDA 12.4 and older, and these are made with CUDA 13.0"
  DRIVER_CUDA=13.0 gpu_check 0 --build "$kit" --stages facts
  sed -i s/90a/120/ "$kit/kit.txt"
  gpu_check 1 --build "$kit" --stages build,bench
  says "is for sm_120, this GPU is sm_90a"
  says "bench: there are no programs: the build stage gave none"
}

# Programs that name libraries which are not there; NCCL has another name, since this machine may have it. ldd is real, and
# so is what stands in NCCL's place.
test_missing_libraries() {
  local name blas=libnoblas.so.13 nccl=libnonccl.so.2
  mkdir "$place/libraries"
  cp -r "$checkout" "$place/checkout"
  checkout=$place/checkout
  chmod -R u+w "$checkout"
  sed -i "s/libnccl\.so\.2/$nccl/g; s/libnccl\\\\.so/libnonccl\\\\.so/" "$checkout/scripts/lib/gpu_check/"{kit,stages}.sh
  for name in $blas $nccl; do
    echo 'int ncclGetVersion(void) { return 0; }' | gcc -x c - -shared -Wl,-soname,$name -o "$place/libraries/$name"
  done
  stand_in_kit no
  echo 'int ncclGetVersion(void); int main(void) { return ncclGetVersion(); }' >"$place/needs.c"
  rm "$kit/gemm_test" "$kit/memory_test"
  gcc "$place/needs.c" "$place/libraries/$nccl" -o "$kit/memory_test"
  gcc -Wl,--no-as-needed "$place/needs.c" "$place/libraries/"{$blas,$nccl} -o "$kit/gemm_test"
  gpu_check 1 --build "$kit" --stages facts,build
  says "FAILED facts: found nowhere: $blas $nccl; give --prefix"
  says "FAILED build: found nowhere"
  rm "$kit/gemm_test"
  # shellcheck source=scripts/lib/gpu_check/kit.sh
  (GPU_CHECK_KIT=$kit && source "$checkout/scripts/lib/gpu_check/kit.sh" && make_no_nccl "$kit/memory_test")
  gpu_check 0 --build "$kit" --stages facts,build,tests,bench
  says "$nccl is found nowhere (--prefix): one rank goes on without"
  says "test programs: all 2 passed; left out, since NCCL is not there: memory_test"
  says "ok bench"
  [[ $(LD_LIBRARY_PATH=$kit/no_nccl "$kit/memory_test"; echo $?) == 2 ]] || fail "calls in NCCL's place do not fail"
  mkdir "$place/prefix" && mv "$place/libraries" "$place/prefix/lib"
  gpu_check 0 --build "$kit" --stages build,tests --prefix "$place/prefix"
  says "test programs: all 3 passed"
}

# A program that ignores SIGTERM and has started another in a session of its own.
test_time_limits() {
  stand_in_kit yes
  nap=7$$.25 act="minillm.train=hang" gpu_check 1 --build "$kit" --stages train,ranks --budget 20
  says "train: killed at its limit of"
  says "skipped ranks: out of time: all 20 s of the budget are used"
  json_says '"result": "failed"'
  gone "7$$.25"
  nap=8$$.25 act="kernels_silu_test=hang" gpu_check 1 --build "$kit" --stages build,tests --budget 20
  says "4 parts had ended, 0 of them failed"
  grep -q "kernels_silu_test: unfinished" "$out/log.txt" || fail "the log does not tell which program hung"
  gone "8$$.25"
}

test_interruption() {
  stand_in_kit yes
  run=$((run + 1)) out=$place/out.$run
  local status=0 pid
  PATH=$tools:$bare CUDA_HOME=$sandbox/none ACT="minillm.train=hang" NAP=9$$.25 TMPDIR=$sandbox \
    "$checkout/scripts/gpu_check.sh" --out "$out" --build "$kit" --stages build,train,ranks >/dev/null 2>&1 &
  pid=$!
  for _ in {1..100}; do
    ! grep -qs '^running *train' "$out/summary.txt" || break
    sleep 0.1
  done
  sleep 0.3
  kill -TERM "$pid"
  wait "$pid" || status=$?
  [[ $status == 1 ]] || fail "interrupted: exit code $status"
  says "FAILED train: interrupted by SIGTERM"
  says "skipped ranks: interrupted by SIGTERM"
  gone "9$$.25"
}

# cmake and nvcc are stand-ins: what they are asked for, and that the two kinds of programs end up in their places.
test_build() {
  mkdir -p "$place/cuda/bin" "$place/cuda/include" "$place/cuda/lib" "$place/prefix/share/cmake/"{CLI11,nlohmann_json,GTest}
  touch "$place/cuda/include/"{nccl,cublasLt}.h "$place/cuda/lib/"{libnccl.so.2,libcublasLt.so}
  touch "$place/prefix/share/cmake/"{CLI11/CLI11,nlohmann_json/nlohmann_json,GTest/GTest}Config.cmake
  echo 'echo "Cuda compilation tools, release 13.0"' | write "$place/cuda/bin/nvcc"
  cp -r "$tools" "$place/tools"
  tools=$place/tools
  write "$tools/cmake" <<END
#!/usr/bin/env bash
echo "\$*" >>"$place/cmake.log"
value() { sed -n "s/.*-D\$1=\([^ ]*\).*/\1/p" <<<"\$line"; }
line="\$*"
if [[ \$1 == -S ]]; then
  mkdir -p "\$4/tests/kernels" "\$4/tests/distributed"
  printf 'MINILLM_%s:BOOL=%s\n' TESTS "\$(value MINILLM_TESTS)" MPI "\$(value MINILLM_MPI)" >"\$4/CMakeCache.txt"
elif [[ \$1 == --build ]]; then
  cp "$build/tests/device/bootstrap_program" "\$2/minillm"
  cp "$build/tests/device/bootstrap_program" "\$2/tests/kernels/kernels_a_test"
  cp "$build/tests/device/bootstrap_program" "\$2/tests/distributed/sharding_test"
fi
END
  touch "$tools/"{mpicxx,ninja} && chmod +x "$tools/"{mpicxx,ninja}
  cuda=$place/cuda gpu_check 0 --prefix "$place/prefix" --work "$place/work" --stages facts,build,shared
  says "for sm_90a, 1 test programs, MPI: yes"
  grep -q -- "MPI=ON -DMINILLM_TESTS=ON -DMINILLM_SHARED_GPU=OFF .*CUDA_ARCHITECTURES=90a-real" "$place/cmake.log" ||
    fail "configured with: $(cat "$place/cmake.log")"
  grep -q -- "MINILLM_SHARED_GPU=ON" "$place/cmake.log" || fail "not configured for ranks that share the GPU"
  grep -q -- "NCCL_LIBRARY=$place/cuda/lib/libnccl.so.2" "$place/cmake.log" || fail "NCCL was not passed on"
  [[ -x $place/work/kit/kernels_a_test && -x $place/work/kit/shared/sharding_test ]] ||
    fail "the kit: $(ls -R "$place/work/kit")"
  cuda=$place/cuda gpu_check 0 --prefix "$place/prefix" --prepare "$place/kit.tar.gz"
  [[ $(tar -tzf "$place/kit.tar.gz") == *./kernels_a_test* ]] || fail "not in the archive: kernels_a_test"
  gpu_check 0 --build "$place/kit.tar.gz" --stages build
  says "for sm_90a, 1 test programs, MPI: yes"
  rm "$tools/mpicxx" "$place/cmake.log"
  cuda=$place/cuda gpu_check 0 --prefix "$place/prefix" --stages build,shared
  grep -q -- "MINILLM_MPI=OFF -DMINILLM_TESTS=ON" "$place/cmake.log" || fail "without MPI: $(cat "$place/cmake.log")"
  says "skipped shared: MPI not found"
  rm "$tools/ninja"
  cuda=$place/cuda gpu_check 1 --prefix "$place/prefix" --stages build
  says "build: missing ninja; give --prefix"
}

test_command_line() {
  gpu_check 2 --fast
  gpu_check 2 --stages build,nonsense
  gpu_check 2 --budget soon
  gpu_check 2 --build "$sandbox/nowhere"
  gpu_check 2 --config "$sandbox/nowhere.json"
  gpu_check 2 --prepare "$sandbox/new" --build "$kit"
  gpu_check 1 --build "$sandbox/actor"
  gpu_check 0 --list
  stand_in_kit yes
  gpu_check 0 --build "$kit" --dry-run
  grep -q "compare_pytorch.py" "$out.printed" || fail "--dry-run does not tell commands"
  [[ $(grep -o -- '--tool [a-z]*' "$out.printed" | uniq | paste -sd ' ') == "--tool memcheck --tool racecheck --tool \
synccheck --tool initcheck" ]] || fail "other tools come before memcheck and racecheck"
  [[ ! -e $out ]] || fail "--dry-run wrote results"
}

# Side by side: most of their time is waiting.
cases=$(compgen -A function test_)
for case in $cases; do
  (
    place=$sandbox/$case
    kit="$place/a kit"
    mkdir "$place"
    "$case"
    exit $((failures > 0))
  ) &
done
while [[ -n $(jobs -p) ]]; do
  wait -n || failures=$((failures + 1))
  jobs >/dev/null
done
written=$(find "$checkout" -newer "$sandbox/before")
[[ -z $written ]] || fail "written into the checkout: $written"
left=$(find "$sandbox" -maxdepth 1 -name 'gpu-check.*')
[[ -z $left ]] || fail "left behind: $left"
((failures == 0))
