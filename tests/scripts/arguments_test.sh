#!/usr/bin/env bash
# The scripts refuse arguments that make no sense before they do anything: message, exit code 1, nothing on stdout.
set -euo pipefail
scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts" && pwd)

refuses() { # MESSAGE COMMAND…
  local message=$1 out status=0
  shift
  out=$("$@" 2>&1 >/dev/null) || status=$?
  if ((status != 1)) || [[ $out != *"$message"* ]]; then
    echo "expected exit code 1 and '$message' from: $*"
    echo "got exit code $status and: $out"
    exit 1
  fi
}

refuses "RANKS must be a whole number from 1 to 9999, not '0'" "$scripts/quickstart.sh" 0
refuses "RANKS must be a whole number from 1 to 9999, not 'two'" "$scripts/quickstart.sh" two
refuses "no file matches" "$scripts/quickstart.sh" 2 "/nonexistent/*.txt"
refuses "at most two arguments" "$scripts/quickstart.sh" 2 a b
refuses "no option '--fast'" "$scripts/test.sh" --fast
refuses "--full and --smoke: one or the other" "$scripts/test.sh" --smoke --full
refuses "no option '--fast'" "$scripts/fresh.sh" --fast
refuses "--steps: a whole number from 1 to 999999, not '0'" "$scripts/fresh.sh" --steps 0
refuses "--steps: a whole number from 1 to 999999, not ''" "$scripts/fresh.sh" --steps
refuses "--keep: '/' exists" "$scripts/fresh.sh" --keep /
refuses "--enter: '/nonexistent' is no root that --keep left" "$scripts/fresh.sh" --enter /nonexistent true
