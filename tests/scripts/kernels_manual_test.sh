#!/usr/bin/env bash
# docs/kernels.md names every TrapNN test, each in the row of its number, and no test that does not exist.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
sandbox=$(mktemp -d)
trap 'rm -rf "$sandbox"' EXIT

# "5 Suite.Trap05_Name" per line, sorted.
of_tests() {
  grep -rhoE '^TEST(_F|_P)?\([A-Za-z0-9_]+, Trap[0-9]{2}_[A-Za-z0-9_]+\)' "$root/tests" |
    sed -E 's/^TEST(_F|_P)?\((.*), (Trap0?([0-9]+)_.*)\)$/\4 \2.\3/' | sort
}
of_manual() { # FILE
  awk -F'|' '/^\| [0-9]+ \|/ {
    row = $2 + 0
    while (match($0, /`[A-Za-z0-9_]+\.Trap[0-9][0-9]_[A-Za-z0-9_]+`/)) {
      print row " " substr($0, RSTART + 1, RLENGTH - 2)
      $0 = substr($0, RSTART + RLENGTH)
    }
  }' "$1" | sort
}
agrees() { # FILE: nothing is printed, or the lines that differ
  diff <(of_tests) <(of_manual "$1")
}

failures=0
manual=$root/docs/kernels.md
(($(of_tests | wc -l) >= 60)) || { echo "FAIL: only $(of_tests | wc -l) tests were found" >&2 && failures=1; }
agrees "$manual" >&2 || { echo "FAIL: < is only in tests/, > only in docs/kernels.md" >&2 && failures=1; }

# Planted: a name that no test has, a test that is left out, a test in another row.
# shellcheck disable=SC2016  # the backquotes are Markdown's
for edit in 's/Trap15_CastOrder/Trap15_CastOrders/' 's/`Gemm.Trap18_[A-Za-z0-9]*`//' 's/^| 22 |/| 21 |/'; do
  sed "$edit" "$manual" >"$sandbox/manual.md"
  ! agrees "$sandbox/manual.md" >/dev/null || { echo "FAIL: not noticed: $edit" >&2 && failures=1; }
done
exit "$failures"
