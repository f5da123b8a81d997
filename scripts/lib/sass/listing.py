"""Reads the texts of `cuobjdump -sass`, `cuobjdump -res-usage` and `ptxas -v`."""

import re
import shutil
import subprocess
from dataclasses import dataclass, field

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
FUNCTION = re.compile(r"^\s*Function\s*:?\s+([\w$.]+)\s*:?\s*$")
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
PTXAS_FUNCTION = re.compile(r"Function properties for ([\w$.]+)")
PTXAS_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

WIDTH_OF_SUFFIX = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
GLOBAL_LOADS = {"LDG", "LD", "LDGSTS"}
GLOBAL_STORES = {"STG", "ST"}
GLOBAL_ATOMICS = {"RED", "REDG", "ATOM", "ATOMG"}
LOCAL_ACCESSES = {"LDL", "STL"}
TENSOR = re.compile(r"^(HMMA|IMMA|QMMA|OMMA|DMMA|BMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA)$")


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  # "@P0", or "" when every thread executes it
    opcode: str  # with its suffixes: LDG.E.128
    operands: str

    @property
    def name(self):
        return self.opcode.split(".", 1)[0]

    @property
    def bytes(self):
        """Bytes per thread of a load or store."""
        suffixes = self.opcode.split(".")[1:]
        return next((WIDTH_OF_SUFFIX[s] for s in suffixes if s in WIDTH_OF_SUFFIX), 4)

    @property
    def is_load(self):
        return self.name in GLOBAL_LOADS

    @property
    def is_store(self):
        return self.name in GLOBAL_STORES

    @property
    def is_global(self):
        return self.is_load or self.is_store or self.name in GLOBAL_ATOMICS

    @property
    def is_tensor(self):
        return TENSOR.match(self.name) is not None

    @property
    def tensor_flops(self):
        """Of one warp. HMMA.16816 is a 16x8x16 product of one warp, HGMMA.64x128x16 one of four warps. The shape of
        a tcgen05 product lies in a descriptor: 0."""
        if match := re.match(r"^\w*MMA\.(16)(8)(\d+)\b", self.opcode):
            m, n, k = map(int, match.groups())
            return 2 * m * n * k
        if match := re.match(r"^\w*GMMA\.(\d+)x(\d+)x(\d+)\b", self.opcode):
            m, n, k = map(int, match.groups())
            return 2 * m * n * k // 4
        return 0


@dataclass
class Kernel:
    name: str  # short: rmsnorm_forward_kernel<bf16, 8, 2>
    architecture: str  # sm_90a
    source: str  # rmsnorm.cu
    registers: int
    stack: int
    shared: int  # bytes, static and reserved
    local: int
    spills: int  # bytes of spill stores and loads
    instructions: list = field(repr=False, default_factory=list)

    def count(self, predicate):
        return sum(1 for i in self.instructions if predicate(i))

    @property
    def static_shared(self):
        """Since sm_90 the system keeps the first KiB of a block that uses shared memory."""
        reserved = 1024 if int(re.search(r"\d+", self.architecture)[0]) >= 90 else 0
        return max(self.shared - reserved, 0)

    @property
    def uses_dynamic_shared(self):
        """Shared memory is touched but none is static. How much a launch adds to static memory is not in the code."""
        return self.static_shared == 0 and any(i.name in ("LDS", "STS", "LDSM", "LDGSTS") for i in self.instructions)


def parse_sass(text):
    """{mangled name: instructions} without the padding after the last one."""
    functions, current = {}, None
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            if current is not None and match[3] != "NOP":
                current.append(Instruction(int(match[1], 16), match[2] or "", match[3], match[4]))
        elif match := FUNCTION.match(line):
            current = functions.setdefault(match[1], [])
    for instructions in functions.values():
        last = instructions[-1] if instructions else None
        if last and last.name == "BRA" and last.operands.strip() == hex(last.address):
            instructions.pop()  # a trap for fetches beyond the end
    return functions


def parse_resources(text):
    """{mangled name: (registers, stack, shared, local)} of cuobjdump -res-usage."""
    found, function = {}, None
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            function = match[1]
        elif (match := RESOURCES.search(line)) and function:
            found[function] = tuple(map(int, match.groups()))
    return found


def parse_spills(text):
    """{mangled name: bytes of spill stores + loads} of ptxas -v."""
    found, function = {}, None
    for line in text.splitlines():
        if match := PTXAS_FUNCTION.search(line):
            function = match[1]
        elif (match := PTXAS_SPILLS.search(line)) and function:
            found[function] = int(match[2]) + int(match[3])
    return found


def demangle(names):
    """{mangled: demangled} with c++filt, which every g++ installation has."""
    if not names:
        return {}
    if shutil.which("c++filt") is None:
        raise SystemExit("sass_report: c++filt is not on PATH; it belongs to binutils, which g++ needs as well")
    result = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, result.stdout.splitlines()))


def short_name(demangled):
    """void minillm::kernels::(anonymous namespace)::f<__nv_bfloat16, (Mode)1>(float*) → f<bf16, 1>"""
    text = demangled.replace("(anonymous namespace)::", "")
    text = re.sub(r"\((?:[\w:]+)\)(\d+)", r"\1", text)  # enumerators and booleans are printed as casts
    depth, end = 0, len(text)
    for i, letter in enumerate(text):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            end = i
            break
    text = text[:end]
    text = re.sub(r"^void\s+", "", text)
    text = re.sub(r"\b(?:\w+::)+", "", text)
    for long, short in (("__nv_bfloat16", "bf16"), ("float", "fp32")):
        text = re.sub(rf"\b{long}\b", short, text)
    return text


def read_kernels(source, architecture, sass, resources, ptxas):
    """The kernels of one cubin, sorted by name."""
    functions, usage, spills = parse_sass(sass), parse_resources(resources), parse_spills(ptxas)
    names = demangle(sorted(functions))
    kernels = []
    for mangled, instructions in functions.items():
        if mangled not in usage:
            raise SystemExit(f"sass_report: {source} {architecture}: cuobjdump -res-usage says nothing of {mangled}")
        registers, stack, shared, local = usage[mangled]
        kernels.append(
            Kernel(
                name=short_name(names[mangled]),
                architecture=architecture,
                source=source,
                registers=registers,
                stack=stack,
                shared=shared,
                local=local,
                spills=spills.get(mangled, 0),
                instructions=instructions,
            )
        )
    return sorted(kernels, key=lambda kernel: kernel.name)
