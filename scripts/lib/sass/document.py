"""docs/machine-code.md: made of the kernels, compared with the committed one."""

import re
from collections import Counter
from itertools import groupby

from .listing import GLOBAL_ATOMICS
from .pressure import GPUS, PIPES, SOURCES, hot_loops
from .rules import EXEMPTIONS, MUST_USE_TENSOR_CORES, WIDE, vector_bytes

REWRITE = "scripts/sass_report.py --write docs/machine-code.md"

INTRODUCTION = """\
# Machine code of the kernels

Made by `scripts/sass_report.py` from what nvcc {version} generates, with the flags of the release build; rewritten with
`{rewrite}`. `scripts/sass_report.py --check` fails when a rule below is
broken or this file no longer describes the kernels.

**Nothing here is a measurement.** The limits are upper bounds: they count, for one iteration of a loop, how many cycles
its instructions occupy each pipe of a multiprocessor, as if latencies, bank conflicts, cache misses and barriers cost
nothing and all pipes worked at the same time. A loop at 100% *may* reach the peak; a loop at 60% cannot exceed 60%.

* An iteration is the way through a loop with the most tensor flops (or bytes, or FFMA) and, of those, the fewest
  instructions: full tiles, no slow paths. Inner loops on the way count once.
* **memory**: bytes of the iteration's global accesses, as if all of them went to device memory; **tensor**: flops of
  its tensor instructions; **fp32**: its FFMA. The limit is the time that these take at the peak divided by the time of
  the busiest pipe, which is named, with the load on it when the kernel runs at its limit.
* Listed are variants that access {wide} bytes at a time and kernels without such variants. Of a kernel's tensor or fp32
  loops the one that computes most is shown; of the memory loops of a kernel without those, the one with {wide}-byte
  accesses that has the lowest limit or, where all reach the peak, the highest load. What a kernel does outside of loops
  counts as one loop. `scripts/sass_report.py --loops REGEX` shows every loop with all its pipes.

{sources}

| architecture | judged as | multiprocessors | clock | memory | bf16 tensor | `mma.sync` | fp32 | int32 | MUFU |
|---|---|---|---|---|---|---|---|---|---|
{gpus}

The middle columns are GHz, GB/s and, twice, flops per cycle and multiprocessor; the last three are results per cycle
and multiprocessor.
"""


def gpu_rows():
    return "\n".join(
        f"| {name} | {g.name} | {g.multiprocessors} | {g.gigahertz} | {g.gigabytes_per_second} | {g.tensor_flops} "
        f"| {g.mma_flops} | {g.fp32} | {g.alu} | {g.xu} |"
        for name, g in GPUS.items()
    )


def rules_section(kernels, exemptions):
    names = {kernel.name for kernel in kernels}
    tensor = sum(1 for name in names if MUST_USE_TENSOR_CORES.match(name))
    wide = sum(1 for name in names if vector_bytes(name) == WIDE)
    lines = [
        "## Rules",
        "",
        f"* No spills and no local memory: all {len(names)} kernels.",
        f"* Tensor instructions in kernels named `{MUST_USE_TENSOR_CORES.pattern}`: {tensor} kernels.",
        "* Loops of variants for aligned tensors move at least half of their bytes in, and of their bytes out,",
        f"  {WIDE} bytes at a time: {wide} kernels, but for",
        "",
        "| kernels | narrow | because |",
        "|---|---|---|",
    ]
    for e in exemptions:
        pattern = e.kernel.replace("|", "\\|")  # a bar would end the cell
        lines.append(f"| `{pattern}` | {e.access} | {e.reason} |")
    return lines


def accesses(kernel, chosen):
    """4 x 16 B, 1 x 4 B"""
    widths = Counter(i.bytes for i in kernel.instructions if chosen(i))
    return ", ".join(f"{count} x {width} B" for width, count in sorted(widths.items(), reverse=True)) or "–"


def shared_memory(kernel):
    if kernel.uses_dynamic_shared:
        return "dynamic"
    return str(kernel.static_shared) if kernel.static_shared else "–"


def kernel_rows(variants):
    """One line for a kernel; `variants` maps architectures to it."""
    shown = variants.get("sm_90a") or next(iter(variants.values()))
    columns = [
        f"`{shown.name}`",
        " ".join(str(k.registers) for k in variants.values()),
        shared_memory(shown),
        " ".join(str(len(k.instructions)) for k in variants.values()),
        accesses(shown, lambda i: i.is_load),
        accesses(shown, lambda i: i.is_store or i.name in GLOBAL_ATOMICS),
        " ".join(str(k.count(lambda i: i.is_tensor)) for k in variants.values())
        if any(k.count(lambda i: i.is_tensor) for k in variants.values())
        else "–",
    ]
    return "| " + " | ".join(columns) + " |"


def kernels_section(kernels):
    architectures = list(dict.fromkeys(kernel.architecture for kernel in kernels))
    lines = [
        "## Kernels",
        "",
        f"Registers, instructions and tensor instructions on {', '.join(architectures)}; static shared memory in bytes",
        "and accesses to global memory (instructions of each width) on sm_90a.",
    ]
    by_source = sorted(kernels, key=lambda kernel: kernel.source)
    for source, group in groupby(by_source, key=lambda kernel: kernel.source):
        lines += ["", f"### {source}", ""]
        lines += ["| kernel | registers | shared | instructions | loads | stores, atomics | tensor |", "|---" * 7 + "|"]
        named = sorted(group, key=lambda kernel: kernel.name)
        for _, variants in groupby(named, key=lambda kernel: kernel.name):
            lines.append(kernel_rows({kernel.architecture: kernel for kernel in variants}))
    return lines


def judged_loops(kernel, flow):
    """{kind: the loop that the kernel is judged by}."""
    gpu = GPUS[kernel.architecture]
    loops = hot_loops(flow)
    kinds = {loop.kind for loop in loops}
    if kinds - {"memory"}:
        kinds.discard("memory")
    judged = {}
    for kind in sorted(kinds):
        of_kind = [loop for loop in loops if loop.kind == kind]
        if kind == "memory":
            wide = [loop for loop in of_kind if loop.wide_bytes()]
            judged[kind] = max(wide or of_kind, key=lambda loop: (loop.slowness(gpu), -loop.address))
        else:
            judged[kind] = max(of_kind, key=lambda loop: (loop.work(), -loop.slowness(gpu), -loop.address))
    return judged


def limits_section(kernels, flows):
    architectures = list(dict.fromkeys(kernel.architecture for kernel in kernels))
    cells, work = {}, {}
    for kernel, flow in zip(kernels, flows):
        width = vector_bytes(kernel.name)
        if width is not None and width < WIDE:
            continue
        for kind, loop in judged_loops(kernel, flow).items():
            share, pipe, load, _ = loop.limit(GPUS[kernel.architecture])
            text = f"{share:.0%} ({pipe} {load:.0%})"
            row = (kernel.source, kernel.name, kind)
            cells.setdefault(row, {})[kernel.architecture] = text
            if kernel.architecture == "sm_90a" or row not in work:
                work[row] = f"{loop.work()} {loop.unit()}"
    lines = ["## Limits", "", "| kernel | judged by | an iteration | " + " | ".join(architectures) + " |"]
    lines.append("|---" * (3 + len(architectures)) + "|")
    for row in sorted(cells):
        columns = [cells[row].get(architecture, "–") for architecture in architectures]
        lines.append(f"| `{row[1]}` | {row[2]} | {work[row]} | " + " | ".join(columns) + " |")
    return lines


def document(kernels, flows, version, exemptions=EXEMPTIONS):
    introduction = INTRODUCTION.format(
        version=version, rewrite=REWRITE, sources=SOURCES, gpus=gpu_rows(), wide=WIDE
    )
    lines = introduction.splitlines() + [""] + rules_section(kernels, exemptions)
    lines += [""] + limits_section(kernels, flows) + [""] + kernels_section(kernels)
    return "\n".join(lines) + "\n"


def written_version(text):
    match = re.search(r"what nvcc (\S+) generates", text)
    return match[1] if match else None


def rows_of(text):
    """{what identifies a line about a kernel: line} of a document's tables."""
    section, rows, seen = "", {}, Counter()
    for line in text.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif match := re.match(r"\| `([^`]+)` \|", line):
            judged = line.split("|")[2].strip() if section == "Limits" else ""
            seen[section, match[1], judged] += 1  # a kernel of a header is in several sources
            rows[section, match[1], judged, seen[section, match[1], judged]] = line
    return rows


def drift(committed, current):
    """What a reader of the committed document would be told wrongly: lines about the kernels that differ."""
    if committed == current:
        return []
    before, now = rows_of(committed), rows_of(current)
    differences = []
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            change = "is gone" if key not in now else "is new" if key not in before else "differs"
            differences.append(f"{key[0]}: `{key[1]}` {change}")
    return differences or ["text outside of the tables"]


def loop_details(kernel, flow):
    """Lines about every hot loop of a kernel with the cycles on each pipe."""
    size = f"{kernel.registers} registers, {len(kernel.instructions)} instructions"
    lines = [f"{kernel.name} on {kernel.architecture}: {size}"]
    for loop in hot_loops(flow):
        share, pipe, load, cycles = loop.limit(GPUS[kernel.architecture])
        where = "outside of loops" if loop.whole else f"loop at {loop.address:#06x}"
        pipes = ", ".join(f"{name} {cycles[name]:.1f}" for name in PIPES if cycles[name])
        lines.append(
            f"  {where}: {len(loop.path)} instructions, {loop.work()} {loop.unit()}, at most {share:.0%} of the "
            f"{loop.kind} peak ({pipe} {load:.0%}); cycles per warp: {pipes}"
        )
    return lines
