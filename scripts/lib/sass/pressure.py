"""How many cycles of a multiprocessor the instructions of a loop occupy on each pipe, and which share of the tensor,
fp32 or memory peak remains possible. An upper bound from throughput alone: no latency, no bank conflicts, no cache
misses, no waits at barriers, clocks at their maximum."""

import re
from dataclasses import dataclass

WARP = 32
SCHEDULERS = 4  # of a multiprocessor; each issues one instruction of one warp per cycle
SHARED_BYTES = 128  # per cycle and multiprocessor, between registers and L1/shared memory


@dataclass(frozen=True)
class Gpu:
    """Rates per cycle and multiprocessor."""

    name: str
    multiprocessors: int
    gigahertz: float
    gigabytes_per_second: float
    tensor_flops: int  # dense bf16 with fp32 accumulation, the peak
    mma_flops: int  # the same through mma.sync
    fp32: int  # results of FFMA, FADD, FMUL
    imad: int
    alu: int  # integer addition, logic, shifts, comparisons, selection, min and max
    xu: int = 16  # MUFU (exp2, log2, rcp, rsqrt, sin, cos) and conversions between integer and floating point
    packed_half: int = 128  # HFMA2 and friends: instructions' lanes, two results each

    @property
    def memory_bytes(self):
        return self.gigabytes_per_second / (self.multiprocessors * self.gigahertz)


# The GPU that each architecture is judged by. Peaks are NVIDIA's data sheets, the clock is the one at which they hold
# (peak = multiprocessors x clock x rate).
GPUS = {
    "sm_80": Gpu("A100 SXM 80 GB", 108, 1.41, 2039, 2048, 2048, 64, 64, 64),
    "sm_90a": Gpu("H100 SXM", 132, 1.83, 3350, 4096, 2576, 128, 64, 64),
    "sm_100": Gpu("B200", 148, 1.856, 8000, 8192, 8192, 128, 64, 64),
    "sm_120": Gpu("RTX 5090", 170, 2.407, 1792, 512, 512, 128, 128, 128),
}

# What the figures rest on; printed in the document.
SOURCES = """\
Arithmetic: the table "Throughput of Native Arithmetic Instructions" of the CUDA C++ Programming Guide (12.6), columns
8.0 and 9.0. sm_100 is taken to equal 9.0; sm_120 has units that do fp32 or int32, so both get 128 lanes. IMAD has half
of the fp32 lanes where those are 128 and shares them. Shared memory and L1: 128 B per cycle and multiprocessor, as
shared memory is specified, for loads, stores and asynchronous copies alike; loads count by the bytes that they bring to
registers, also where threads read the same word; a shuffle is one cycle of the same pipe. Tensor cores: the data sheet's
peak / (multiprocessors x clock). On Hopper `mma.sync` reaches 62.9 % of the peak, which is `wgmma`'s (arXiv:2402.13499);
on sm_100, whose peak is `tcgen05.mma`'s, no figure is known here and none is applied: its tensor shares are too high."""

FP32 = {"FFMA", "FADD", "FMUL", "FFMA32I", "FADD32I", "FMUL32I", "FSWZADD"}
PACKED_FP32 = {"FFMA2", "FADD2", "FMUL2"}
PACKED_HALF = {"HFMA2", "HADD2", "HMUL2", "HFMA2_32I", "HADD2_32I"}
IMAD = {"IMAD", "IMAD32I", "IDP"}
XU = {"MUFU", "I2F", "F2I", "F2F", "FRND", "POPC", "FLO", "BREV"}
SHARED = {"LDS", "STS", "ATOMS"}
MATRICES = {"LDSM", "STSM"}
EXCHANGE = {"SHFL"}
ISSUE_ONLY = re.compile(
    r"^(U[A-Z]\w*|R2UR|S2U?R|CS2R|LDC|LDCU|BRA|EXIT|RET|CALL|BSSY|BSYNC|BREAK|BMOV|NOP|BAR|WARPSYNC|YIELD|NANOSLEEP|"
    r"DEPBAR|LDGDEPBAR|LDSDEPBAR|MEMBAR|ERRBAR|CCTL\w*|FENCE|SYNCS|ARRIVES|WARPGROUP|ELECT|JMP|ACQBULK|PREEXIT|"
    r"LDL|STL)$"
)


def shared_bytes(instruction):
    """Bytes per warp between registers and L1/shared memory."""
    if instruction.name in MATRICES:
        count = re.search(r"\.([124])$", instruction.opcode)
        return 128 * (int(count[1]) if count else 1)
    return WARP * instruction.bytes


def pipe_of(instruction):
    name = instruction.name
    if instruction.is_tensor:
        return "tensor"
    if instruction.is_global or name in SHARED or name in MATRICES or name in EXCHANGE:
        return "L1/shared"
    if name in FP32 or name in PACKED_FP32 or name in PACKED_HALF or name in IMAD:
        return "fp32"
    if name in XU:
        return "xu"
    return None if ISSUE_ONLY.match(name) else "alu"


PIPES = ("issue", "tensor", "fp32", "alu", "xu", "L1/shared")


def pipe_cycles(instructions, gpu):
    """{pipe: cycles of one multiprocessor for one warp}."""
    cycles = dict.fromkeys(PIPES, 0.0)
    imad = 0
    for i in instructions:
        cycles["issue"] += 1 / SCHEDULERS
        pipe = pipe_of(i)
        if pipe == "tensor":
            rate = gpu.tensor_flops if "GMMA" in i.name else gpu.mma_flops
            cycles[pipe] += i.tensor_flops / rate
        elif pipe == "L1/shared":
            moved = WARP * 4 if i.name in EXCHANGE else shared_bytes(i)
            cycles[pipe] += max(moved, SHARED_BYTES) / SHARED_BYTES
        elif pipe == "fp32":
            lanes = gpu.packed_half if i.name in PACKED_HALF else gpu.fp32
            cycles[pipe] += WARP / lanes * (2 if i.name in PACKED_FP32 else 1)
            imad += i.name in IMAD
        elif pipe == "alu":
            cycles[pipe] += WARP / gpu.alu
        elif pipe == "xu":
            cycles[pipe] += WARP / gpu.xu
    cycles["fp32"] = max(cycles["fp32"], imad * WARP / gpu.imad)
    return cycles


@dataclass(frozen=True)
class HotLoop:
    kind: str  # tensor, memory, fp32
    address: int  # of its first instruction
    path: list  # the instructions of an iteration
    whole: bool  # what the kernel does outside of loops rather than a loop

    def work(self):
        """Of an iteration, in units of unit()."""
        return sum(WEIGHTS[self.kind](i) for i in self.path)

    def unit(self):
        return {"tensor": "flops per warp", "memory": "B per thread", "fp32": "FFMA per thread"}[self.kind]

    def wide_bytes(self):
        return sum(i.bytes for i in self.path if i.is_global and i.bytes >= 16)

    def ideal(self, gpu):
        """Cycles of a multiprocessor for one warp at the peak of the loop's kind."""
        rates = {"tensor": gpu.tensor_flops, "fp32": gpu.fp32 / WARP, "memory": gpu.memory_bytes / WARP}
        return self.work() / rates[self.kind]

    def slowness(self, gpu):
        """Time of the busiest pipe by ideal(): above 1 the peak is out of reach."""
        ideal = self.ideal(gpu)
        return max(pipe_cycles(self.path, gpu).values()) / ideal if ideal else float("inf")

    def limit(self, gpu):
        """(share of the peak of its kind, the busiest pipe, its load at that share, {pipe: cycles})."""
        cycles = pipe_cycles(self.path, gpu)
        busiest = max(cycles, key=cycles.get)
        time = max(self.ideal(gpu), cycles[busiest])
        return self.ideal(gpu) / time, busiest, cycles[busiest] / time, cycles


WEIGHTS = {
    "tensor": lambda i: i.tensor_flops or i.is_tensor,
    "memory": lambda i: i.bytes if i.is_global else 0,
    "fp32": lambda i: i.name == "FFMA",
}
LEAST_FFMA = 32  # of a loop that counts as a matrix product without tensor cores


def hot_loops(flow):
    """The loops worth a look: the smallest with tensor instructions, with global accesses and no tensor instructions,
    with many FFMA and neither; and as if it were a loop what the kernel does once."""
    found, claimed = [], set()
    for kind, weight in WEIGHTS.items():
        for header in flow.smallest_loops(weight):
            if header in claimed:
                continue
            claimed.add(header)
            path = flow.heaviest_path(header, weight)
            if kind == "fp32" and sum(map(weight, path)) < LEAST_FFMA:
                continue
            found.append(HotLoop(kind, flow.blocks[header].instructions[0].address, path, whole=False))
    looped = {i.address for body in flow.loops.values() for i in flow.instructions_of(body)}
    way = flow.heaviest_path(None, lambda i: 0 if i.address in looped else WEIGHTS["memory"](i))
    once = [i for i in way if i.address not in looped]
    if any(i.is_global for i in once):
        found.append(HotLoop("memory", once[0].address, once, whole=True))
    return found
