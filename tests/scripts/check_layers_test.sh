#!/usr/bin/env bash
# Plants violations of the include rule in a small tree, one at a time, and demands that scripts/check_layers.sh reports
# exactly that line; then allowed includes, about which it must be silent.
set -euo pipefail
check=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)/scripts/check_layers.sh
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
failures=0

fail() {
  echo "FAIL: $*" >&2
  failures=$((failures + 1))
}

plant() { # FILE INCLUDE: a file whose third line is the include
  rm -rf "${tree:?}"/*
  mkdir -p "$tree/src/core" "$tree/kernels" "$tree/$(dirname -- "$1")"
  printf '// A file.\n#include <vector>\n#include %s\nint a;\n' "$2" >"$tree/$1"
}

reports() { # FILE INCLUDE
  local output status=0
  plant "$1" "$2"
  output=$("$check" "$tree" 2>&1) || status=$?
  [[ $status == 1 ]] || fail "$1 with $2: exit code $status instead of 1"
  [[ $output == "$1:3: "* && $(wc -l <<<"$output") == 1 ]] || fail "$1 with $2: printed '$output'"
}

is_silent() { # FILE INCLUDE
  local output status=0
  plant "$1" "$2"
  output=$("$check" "$tree" 2>&1) || status=$?
  [[ $status == 0 && -z $output ]] || fail "$1 with $2: exit code $status, printed '$output'"
}

# Every folder includes the one below it, and never the one above it.
folders=(app train data checkpoint profile model shard comm cuda config core)
for ((i = 0; i + 1 < ${#folders[@]}; i++)); do
  upper=${folders[i]} lower=${folders[i + 1]}
  reports "src/$lower/a.cpp" "\"$upper/b.h\""
  is_silent "src/$upper/a.cpp" "\"$lower/b.h\""
  is_silent "src/$upper/a.cpp" "\"$upper/b.h\""
done
reports src/core/philox.h '"app/command.h"'
reports src/shard/deep/er/a.h '<model/transformer.h>'
reports src/data/a.cpp '  "train/trainer.h"  // why not'

# kernels/: core only, and nothing below cuda/ needs a kernel.
reports kernels/silu.cu '"cuda/stream.h"'
reports kernels/device/vec.h '"config/config.h"'
reports src/config/a.cpp '"kernels/silu.h"'
is_silent kernels/silu.cu '"core/dtype.h"'
is_silent kernels/silu.cu '"kernels/device/launch.h"'
is_silent kernels/silu.cu '<cuda/barrier>'
is_silent src/shard/a.cpp '"kernels/reduction.h"'

# The simulated device.
reports src/train/a.cpp '"sim/simt.h"'
reports kernels/device/vec.h '<sim/simt.h>'
reports src/sim/a.cpp '"cuda/stream.h"'
reports src/sim/a.cpp '"kernels/silu.h"'
is_silent kernels/device/ptx.h '"sim/simt.h"'
is_silent src/sim/a.cpp '"sim/simt.h"'
is_silent src/sim/a.cpp '"core/error.h"'

# Ways around the rule.
reports src/core/a.h '"../app/command.h"'
reports src/core/a.h '"src/app/command.h"'
reports src/core/a.h '"tests/helper.h"'
plant src/utils/a.h '"core/error.h"'
"$check" "$tree" >/dev/null && fail "a folder without a place in the order is accepted"

status=0
"$check" "$tree/src" >/dev/null 2>&1 || status=$?
[[ $status == 2 ]] || fail "a ROOT that is no checkout: exit code $status instead of 2"

if ((failures > 0)); then
  echo "$failures failure(s)" >&2
  exit 1
fi
