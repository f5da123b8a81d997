"""What must hold for the machine code of every kernel."""

import re
from dataclasses import dataclass

from .listing import LOCAL_ACCESSES
from .pressure import hot_loops

# Tensor-core kernels: without tensor instructions they would still be right, and slow.
MUST_USE_TENSOR_CORES = re.compile(r"^attention_(forward|backward)\w*_mma\w*kernel\b")

SIZES = {"bf16": 2, "fp32": 4}
WIDE = 16  # bytes, the widest access of a thread


@dataclass(frozen=True)
class Exemption:
    """Why loops of a full-width kernel may access global memory by less than 16 bytes."""

    kernel: str  # a regular expression for the short name
    access: str  # loads or stores
    reason: str
    everywhere: bool = False  # the kernel has no 16-byte access of this kind at all; otherwise one is demanded


EXEMPTIONS = (
    Exemption(
        r"^cast_kernel<bf16, fp32, ",
        "stores",
        "a vector is 16 bytes of the fp32 side and 8 of the bf16 side",
        everywhere=True,
    ),
    Exemption(
        r"^cast_kernel<fp32, bf16, ",
        "loads",
        "a vector is 16 bytes of the fp32 side and 8 of the bf16 side",
        everywhere=True,
    ),
    *(
        Exemption(kernels, access, "what is left of a tensor, less than a vector, has a loop of its own")
        for kernels, access in (
            (r"^(silu_\w+|cast|adamw|accumulate)_kernel<", "loads"),
            (r"^(silu_\w+|cast|adamw|accumulate)_kernel<", "stores"),
            (r"^sum_ranges_kernel<", "loads"),
            (r"^cross_entropy_kernel<", "stores"),
        )
    ),
)


@dataclass(frozen=True)
class Finding:
    kernel: str
    architecture: str
    text: str

    def __str__(self):
        return f"{self.kernel} on {self.architecture}: {self.text}"


def vector_bytes(name):
    """Bytes of a vector by a kernel's name, or None. Types come first among the template arguments, then the elements
    of a vector; without types they are fp32."""
    arguments = name.partition("<")[2].rstrip(">").split(", ") if "<" in name else []
    sizes = []
    while arguments and arguments[0] in SIZES:
        sizes.append(SIZES[arguments.pop(0)])
    if not arguments or not arguments[0].isdigit():
        return None
    return int(arguments[0]) * max(sizes, default=SIZES["fp32"])


def local_memory(kernel):
    parts = []
    if kernel.spills:
        parts.append(f"{kernel.spills} bytes of spills")
    accesses = kernel.count(lambda i: i.name in LOCAL_ACCESSES)
    if accesses or kernel.stack or kernel.local:
        parts.append(f"{accesses} accesses to local memory, {kernel.stack + kernel.local} bytes of it")
    return [Finding(kernel.name, kernel.architecture, " and ".join(parts))] if parts else []


def tensor_cores(kernel):
    if not MUST_USE_TENSOR_CORES.match(kernel.name) or kernel.count(lambda i: i.is_tensor):
        return []
    return [Finding(kernel.name, kernel.architecture, "a tensor-core kernel without a tensor instruction (HMMA)")]


def narrow_accesses(kernel, flow, exemptions):
    """Loops of a full-width kernel that move more than half of their bytes in or out by less than 16 at a time.
    Also returns the exemptions that were needed."""
    findings, used = [], set()
    if vector_bytes(kernel.name) != WIDE:
        return findings, used
    loops = [loop for loop in hot_loops(flow) if loop.kind == "memory"]
    for loop in loops:
        if loop.whole and len(loops) > 1:  # what comes before and after loops: row statistics, indices
            continue
        for access, chosen in (("loads", lambda i: i.is_load), ("stores", lambda i: i.is_store)):
            moved = [i for i in loop.path if chosen(i)]
            narrow = sum(i.bytes for i in moved if i.bytes < WIDE)
            if 2 * narrow <= sum(i.bytes for i in moved):
                continue
            exemption = next((e for e in exemptions if e.access == access and re.search(e.kernel, kernel.name)), None)
            if exemption and (exemption.everywhere or kernel.count(lambda i: chosen(i) and i.bytes >= WIDE)):
                used.add(exemption)
                continue
            where = "the kernel, which has no such loop," if loop.whole else f"the loop at {loop.address:#06x}"
            kinds = ", ".join(sorted({i.opcode for i in moved if i.bytes < WIDE}))
            share = f"{narrow} of {sum(i.bytes for i in moved)} bytes per thread"
            text = f"{where} {access} {share} by less than {WIDE} ({kinds})"
            findings.append(Finding(kernel.name, kernel.architecture, text))
    return findings, used


def check(kernels, flows, exemptions=EXEMPTIONS):
    """All findings; `flows` are the kernels' ControlFlow."""
    findings, used = [], set()
    for kernel, flow in zip(kernels, flows):
        findings += local_memory(kernel) + tensor_cores(kernel)
        narrow, needed = narrow_accesses(kernel, flow, exemptions)
        findings += narrow
        used |= needed
    for exemption in exemptions:
        if exemption not in used:
            text = f"exempt for {exemption.access} without need"
            findings.append(Finding(exemption.kernel, "every architecture", text))
    return findings
