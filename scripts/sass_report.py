#!/usr/bin/env python3
"""Reads the machine code that nvcc makes of kernels/*.cu, for every architecture of the build: registers, shared
memory, spills, widths of global accesses, tensor instructions, and what the instruction mix of each hot loop permits at
most.

    scripts/sass_report.py                                  prints the report
    scripts/sass_report.py --write docs/machine-code.md     writes it
    scripts/sass_report.py --check                          fails when a rule is broken or the document is out of date
    scripts/sass_report.py --loops 'rmsnorm.*bf16, 8'       every hot loop of some kernels with all its pipes

Needs nvcc (no GPU). cuobjdump and nvdisasm are installed from PyPI into build/sass when the toolkit has none. A first
run compiles for some minutes, later ones only what changed. Returns 0, 1 for findings, 2 for a wrong command line.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
from sass import build, document, rules  # noqa: E402
from sass.loops import ControlFlow  # noqa: E402
from sass.pressure import GPUS  # noqa: E402

DOCUMENT = build.ROOT / "docs" / "machine-code.md"


def check_document(current, version, path=DOCUMENT):
    """Lines to print, and whether one of them is a failure."""
    if not path.exists():
        return [f"{path} is missing; write it with {document.REWRITE}"], True
    committed = path.read_text()
    written = document.written_version(committed)
    if written != version:
        return [f"{path} describes nvcc {written}, this is {version}: only the rules were checked"], False
    differences = document.drift(committed, current)
    if not differences:
        return [], False
    shown = differences[:10] + ([f"… {len(differences) - 10} more"] if len(differences) > 10 else [])
    return [f"{path} is out of date; rewrite it with {document.REWRITE}", *("  " + line for line in shown)], True


def check(kernels, flows, version, path=DOCUMENT):
    findings = rules.check(kernels, flows)
    for finding in findings:
        print(f"sass_report: {finding}", file=sys.stderr)
    lines, outdated = check_document(document.document(kernels, flows, version), version, path)
    for line in lines:
        print(f"sass_report: {line}", file=sys.stderr)
    if findings or outdated:
        return 1
    print(f"sass_report: {len(kernels)} kernels (all architectures), no findings")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", type=Path, metavar="FILE", help="write the report instead of printing it")
    mode.add_argument("--check", action="store_true", help="check the rules and docs/machine-code.md")
    mode.add_argument("--loops", metavar="REGEX", help="print the hot loops of kernels whose name matches")
    arguments = parser.parse_args()

    unknown = [a for a in build.architectures() if f"sm_{a}" not in GPUS]
    if unknown:
        build.fail(f"no GPU is known for sm_{unknown[0]} of CMakePresets.json; add one to scripts/lib/sass/pressure.py")
    toolchain = build.Toolchain()
    kernels = build.read_all(toolchain)
    flows = [ControlFlow(kernel.instructions) for kernel in kernels]
    if arguments.check:
        return check(kernels, flows, toolchain.version)
    if arguments.loops:
        for kernel, flow in zip(kernels, flows):
            if re.search(arguments.loops, kernel.name):
                print("\n".join(document.loop_details(kernel, flow)))
        return 0
    text = document.document(kernels, flows, toolchain.version)
    if arguments.write:
        arguments.write.write_text(text)
        print(f"sass_report: wrote {arguments.write}")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
