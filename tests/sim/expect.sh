#!/usr/bin/env bash
# expect.sh EXIT_CODE TEXT COMMAND…: succeeds when COMMAND ends with EXIT_CODE and prints TEXT (a regular expression);
# with TEXT '' it must print nothing.
set -u
code=$1 text=$2
shift 2
output=$("$@" 2>&1)
found=$?
printf '%s\n' "$output"
if [[ $found -ne $code ]]; then
  echo "expected exit code $code, found $found" >&2
  exit 1
fi
if [[ -z $text && -n $output ]]; then
  echo "expected no output" >&2
  exit 1
fi
if ! grep -qE -- "$text" <<<"$output"; then
  echo "expected output matching: $text" >&2
  exit 1
fi
