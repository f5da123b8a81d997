# shellcheck shell=bash
# shellcheck disable=SC2154  # repo_root is setup.sh's
# Sourced by gpu_check.sh: the stages, one after the other, each a process of its own (stages.sh) with a time limit, and the
# summary, which is rewritten whenever something has ended, so that a killed run leaves what it had found.

stage_names=(facts build tests sanitizer bench train shared ranks pytorch)
# Seconds. Whoever compiles has 300 left for the rest; with --build there is time for all that is not stuck. PyTorch's
# compiler takes about 100 of its stage's.
declare -A stage_limit=(
  [facts]=30 [build]=180 [tests]=90 [sanitizer]=90 [bench]=60 [train]=60 [shared]=45 [ranks]=75 [pytorch]=240
)
declare -A stage_about=(
  [facts]="records GPU, driver, tools, processors"
  [build]="builds for this GPU, or looks at what --build brings"
  [tests]="kernels, matrix products, memory, executor, parity with PyTorch's recorded runs"
  [sanitizer]="compute-sanitizer: memcheck, racecheck, synccheck, initcheck on small tests"
  [bench]="minillm bench: bench.json"
  [train]="20 steps of --config on one rank: train.jsonl"
  [shared]="builds again with MPI in NCCL's place, so that ranks can share the GPU; only links"
  [ranks]="collectives and training with two and four ranks on the one GPU; losses must be those of one rank"
  [pytorch]="scripts/compare_pytorch.py: the same training with FSDP2; compare.json, compare_compiled.json"
)
# A stage is not started with less: it could only be killed.
least_seconds=3
# After its limit a stage is asked to end, this much later it is killed.
grace_seconds=2

selected=()
declare -A outcome=() seconds=() remark=()
running="" child="" token="" begun=""

select_stages() { # A,B,…, or nothing for all
  local name
  local -a wanted
  IFS=, read -ra wanted <<<"$1"
  for name in "${wanted[@]}"; do
    [[ -n ${stage_limit[$name]-} ]] || usage_error "--stages: no stage '$name' among ${stage_names[*]}"
  done
  # Their order is that of the list: later ones use what earlier ones leave.
  for name in "${stage_names[@]}"; do
    if ((${#wanted[@]} == 0)) || [[ " ${wanted[*]} " == *" $name "* ]]; then
      selected+=("$name")
    fi
  done
}

list_stages() {
  local name
  for name in "${selected[@]}"; do
    printf '%-10s %4d s  %s\n' "$name" "${stage_limit[$name]}" "${stage_about[$name]}"
  done
}

dry_run() {
  local name
  for name in "${selected[@]}"; do
    printf '==> %s, at most %d s: %s\n' "$name" "${stage_limit[$name]}" "${stage_about[$name]}"
    GPU_CHECK_DRY=yes GPU_CHECK_OUT='$OUT' GPU_CHECK_LIMIT=${stage_limit[$name]} \
      bash "$repo_root/scripts/lib/gpu_check/stages.sh" "$name" || true
  done
}

check() { # BUDGET: all stages
  local name
  budget=$1
  token=gpu-check-$$-$RANDOM$RANDOM
  begun=$(date --iso-8601=seconds)
  trap 'interrupted INT' INT
  trap 'interrupted TERM' TERM
  : >"$GPU_CHECK_OUT/log.txt"
  rm -f "$GPU_CHECK_WORK"/{machine,note,results}
  note "results go to $GPU_CHECK_OUT"
  for name in "${selected[@]}"; do
    run_stage "$name"
    write_summary
    summary_line "$name"
  done
  note "$(totals)"
  ! has_failed
}

run_stage() { # NAME
  local name=$1 left=$((budget - SECONDS)) limit=${stage_limit[$1]} status=0 start=$SECONDS log=$GPU_CHECK_OUT/log.txt first
  if ((left < least_seconds)); then
    outcome[$name]=skipped remark[$name]="out of time: all $budget s of the budget are used"
    return
  fi
  # What is killed may take its grace, and the budget holds all the same.
  ((limit <= left - grace_seconds)) || limit=$((left - grace_seconds))
  running=$name
  write_summary
  printf '\n======== %s: at most %d s\n' "$name" "$limit" >>"$log"
  first=$(($(wc -c <"$log") + 1))
  rm -rf "$GPU_CHECK_WORK/note" "$GPU_CHECK_WORK/results" "$GPU_CHECK_WORK/each"
  GPU_CHECK_TOKEN=$token GPU_CHECK_LIMIT=$limit timeout -k "$grace_seconds" "$limit" \
    bash "$repo_root/scripts/lib/gpu_check/stages.sh" "$name" >>"$log" 2>&1 </dev/null &
  child=$!
  wait "$child" || status=$?
  child=""
  end_leftovers
  running=""
  seconds[$name]=$((SECONDS - start))
  remark[$name]=$(cat "$GPU_CHECK_WORK/note" 2>/dev/null || true)
  case $status in
    0) outcome[$name]=ok ;;
    77) outcome[$name]=skipped ;;
    78) outcome[$name]=incomplete ;;
    79) outcome[$name]=partly ;;
    124 | 137)
      outcome[$name]=$(outcome_of_killed "$name")
      remark[$name]="killed at its limit of $limit s; $(how_far "$first")"
      keep_unfinished
      ;;
    *)
      outcome[$name]=FAILED
      remark[$name]=${remark[$name]:-"exit code $status: $(last_line "$first")"}
      ;;
  esac
  printf -- '-------- %s: %s, %d s: %s\n' "$name" "${outcome[$name]}" "${seconds[$name]}" "${remark[$name]}" >>"$log"
}

# Tools take a hundred times as long as what they look at: that one did not end is no fault of the program.
outcome_of_killed() { # NAME
  local results=$GPU_CHECK_WORK/results
  if [[ $1 == sanitizer ]] && ! grep -qv '^0 ' "$results" 2>/dev/null; then
    echo incomplete
  elif grep -q '^0 ' "$results" 2>/dev/null; then
    echo partly
  else
    echo FAILED
  fi
}

last_line() { tail -c "+$1" "$GPU_CHECK_OUT/log.txt" | grep -v '^[[:space:]]*$' | tail -n 1 | cut -c 1-300; }

how_far() { # FIRST: what a killed stage had done
  local results=$GPU_CHECK_WORK/results
  if [[ -f $results ]]; then
    printf '%d parts had ended, %d of them failed' "$(wc -l <"$results")" "$(grep -vc '^0 ' "$results" || true)"
  else
    printf 'its last line: %s' "$(last_line "$1")"
  fi
}

# The output of a part goes into the log when the part ends; these did not.
keep_unfinished() {
  local file
  for file in "$GPU_CHECK_WORK"/each/*.running; do
    [[ -f $file ]] || return 0
    printf -- '---- %s: unfinished; the end of its output:\n' "$(basename -- "$file" .running)"
    tail -n 20 "$file"
  done >>"$GPU_CHECK_OUT/log.txt"
}

# Everything that a stage starts carries the token in its environment. Process groups do not tell: mpirun, timeout and the
# comparison with PyTorch give their children groups and sessions of their own.
end_leftovers() {
  local -a found
  local try
  for try in 1 2 3; do
    mapfile -t found < <(grep -lszxF "GPU_CHECK_TOKEN=$token" /proc/[0-9]*/environ | cut -d / -f 3)
    ((${#found[@]} > 0)) || return 0
    kill -KILL "${found[@]}" 2>/dev/null || true
    sleep "0.$try"
  done
}

end_run() {
  [[ -n $token ]] || return 0
  if [[ -n $child ]]; then
    kill -TERM -- "-$child" 2>/dev/null || true
  fi
  end_leftovers
}

interrupted() { # SIGNAL
  trap '' INT TERM
  end_run
  local name
  for name in "${selected[@]}"; do
    if [[ $name == "$running" ]]; then
      outcome[$name]=FAILED remark[$name]="interrupted by SIG$1"
    elif [[ -z ${outcome[$name]-} ]]; then
      outcome[$name]=skipped remark[$name]="interrupted by SIG$1"
    fi
  done
  running=""
  write_summary
  exit 1
}

has_failed() { [[ " ${outcome[*]-} " == *" FAILED "* || " ${outcome[*]-} " == *" partly "* ]]; }

count() { # OUTCOME
  local name number=0
  for name in "${selected[@]}"; do
    [[ ${outcome[$name]-} != "$1" ]] || number=$((number + 1))
  done
  echo "$number"
}

totals() {
  printf '%d ok, %d partly, %d failed, %d incomplete, %d skipped of %d stages; %d s of %d s' "$(count ok)" \
    "$(count partly)" "$(count FAILED)" "$(count incomplete)" "$(count skipped)" "${#selected[@]}" "$SECONDS" "$budget"
}

summary_line() { # NAME
  local time=""
  [[ -z ${seconds[$1]-} || ${outcome[$1]} == skipped ]] || time="${seconds[$1]} s"
  printf '%-10s %6s  %s%s\n' "${outcome[$1]}" "$time" "$1" "${remark[$1]:+: ${remark[$1]}}"
}

machine() { sed -n "s/^$1=//p" "$GPU_CHECK_WORK/machine" 2>/dev/null || true; }

write_summary() {
  local name
  {
    printf 'gpu_check of %s: %s, driver %s\n' "$begun" "$(machine gpu)" "$(machine driver)"
    for name in "${selected[@]}"; do
      if [[ -n ${outcome[$name]-} ]]; then
        summary_line "$name"
      elif [[ $name == "$running" ]]; then
        printf 'running            %s\n' "$name"
      else
        printf 'to come            %s\n' "$name"
      fi
    done
    totals
    echo
  } >"$GPU_CHECK_OUT/summary.txt.new"
  summary_json >"$GPU_CHECK_OUT/summary.json.new"
  # Renamed when complete: nobody sees half of one.
  mv -f "$GPU_CHECK_OUT/summary.txt.new" "$GPU_CHECK_OUT/summary.txt"
  mv -f "$GPU_CHECK_OUT/summary.json.new" "$GPU_CHECK_OUT/summary.json"
}

json_string() {
  local text=$1
  text=${text//\\/\\\\}
  text=${text//\"/\\\"}
  text=${text//[[:cntrl:]]/ }
  printf '"%s"' "$text"
}

summary_json() {
  local key name state result=running separator=""
  if ((${#outcome[@]} == ${#selected[@]})); then
    if has_failed; then result=failed; else result=ok; fi
  fi
  printf '{"begun": %s, "result": "%s", "seconds": %d, "budget_s": %d,\n "machine": {' \
    "$(json_string "$begun")" "$result" "$SECONDS" "$budget"
  for key in gpu driver arch nvcc cpus commit; do
    printf '%s"%s": %s' "$separator" "$key" "$(json_string "$(machine $key)")"
    separator=", "
  done
  printf '},\n "stages": ['
  separator=""
  for name in "${selected[@]}"; do
    state=${outcome[$name]-}
    [[ $name != "$running" ]] || state=running
    printf '%s\n  {"name": "%s", "result": "%s", "seconds": %d, "limit_s": %d, "note": %s}' "$separator" "$name" \
      "$(tr '[:upper:]' '[:lower:]' <<<"${state:-to come}")" "${seconds[$name]:-0}" "${stage_limit[$name]}" \
      "$(json_string "${remark[$name]-}")"
    separator=,
  done
  printf '\n]}\n'
}
