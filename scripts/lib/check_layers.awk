# The rule of scripts/check_layers.sh, which says what it is. Input: the sources, named from the root.

BEGIN {
  count = split("app train data checkpoint profile model shard comm cuda kernels config core", order, " ")
  for (i = 1; i <= count; i++) level[order[i]] = i
  # Not in the order, but names of the project nevertheless.
  project["sim"]; project["tests"]; project["src"]
  for (folder in level) project[folder]
}

function report(why) {
  printf "%s:%d: %s\n", FILENAME, FNR, why
  offenders++
}

# Why `from` may not include `target`, a path that starts with the folder `to`; "" if it may.
function objection(from, to, target) {
  if (to == "sim") {
    if (from == "sim" || FILENAME ~ /^kernels\/device\/(launch|shared|ptx)\.h$/) return ""
    return "includes the simulated device by name (" target "); include the vendor header instead"
  }
  if (to == "tests" || to == "src") return "includes " target "; project headers are named from src/ or the root"
  if (from == to) return ""
  if (from == "sim" && to != "core") return "src/sim is below everything and may not include " target
  if (from == "kernels" && to != "core") return "kernels/ includes only core/ and kernels/, not " target
  if (from != "sim" && level[to] < level[from]) return from "/ is below " to "/ and may not include " target
  return ""
}

FNR == 1 {
  split(FILENAME, part, "/")
  from = part[1] == "src" ? part[2] : "kernels"
  if (from != "sim" && !(from in level)) report("folder src/" from " has no place in the order")
}

/^[ \t]*#[ \t]*include[ \t]*["<]/ {
  target = $0
  sub(/^[^"<]*["<]/, "", target)
  sub(/[">].*$/, "", target)
  if (target ~ /(^|\/)\.\.?\//) {
    report("includes " target "; name project headers from src/ or the root, without ./ and ../")
    next
  }
  to = target
  sub(/\/.*$/, "", to)
  if (target !~ /\// || !(to in project)) next  # a vendor header, or one beside the file
  if ($0 ~ /<cuda\//) next                      # CUDA's own C++ library
  why = objection(from, to, target)
  if (why != "") report(why)
}

END { exit offenders > 0 }
