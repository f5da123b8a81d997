#!/usr/bin/env python3
"""scripts/sass_report.py on recorded machine code with planted faults: each must be found, and nothing else. The code
is what nvcc 13.0.88 and cuobjdump 13.2.86 made of sass/fixture.cu; neither is needed here."""

import contextlib
import dataclasses
import io
import re
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "scripts"))
import sass_report  # noqa: E402
from sass import document, listing, pressure, rules  # noqa: E402
from sass.loops import ControlFlow  # noqa: E402

ARCHITECTURES = ("sm_80", "sm_120")


def fixture(architecture):
    texts = [(HERE / "sass" / f"fixture.{architecture}.{kind}").read_text() for kind in ("sass", "resources", "ptxas")]
    return {kernel.name: kernel for kernel in listing.read_kernels("fixture.cu", architecture, *texts)}


KERNELS = {architecture: fixture(architecture) for architecture in ARCHITECTURES}
SOUND = ("attention_forward_mma_kernel", "nested_kernel", "wide_kernel<fp32, 4>")


def findings(kernels, exemptions=()):
    return rules.check(kernels, [ControlFlow(k.instructions) for k in kernels], exemptions)


def assemble(*lines):
    """Instructions of a hand-written listing, one every 16 bytes."""
    text = "\tFunction : f\n" + "\n".join(f"  /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines))
    return listing.parse_sass(text)["f"]


class Listing(unittest.TestCase):
    def test_kernels_and_resources(self):
        kernels = KERNELS["sm_80"]
        self.assertEqual(len(kernels), 6)
        spilling = kernels["spill_kernel"]
        self.assertEqual((spilling.registers, spilling.stack, spilling.spills), (32, 200, 208 + 252))
        self.assertEqual(kernels["attention_forward_mma_kernel"].static_shared, 4096)
        self.assertEqual(KERNELS["sm_120"]["attention_forward_mma_kernel"].static_shared, 4096)  # without the system's

    def test_padding_does_not_count(self):
        instructions = KERNELS["sm_80"]["wide_kernel<fp32, 4>"].instructions
        self.assertEqual(instructions[-1].opcode, "EXIT")  # not the trap behind the end, a branch to itself
        self.assertFalse([i for i in instructions if i.name == "NOP"])

    def test_widths(self):
        opcodes = {
            "LDG.E": 4, "LDG.E.128.CONSTANT": 16, "LDG.E.64": 8, "LDG.E.U8": 1, "STG.E.U16": 2, "LDG.E.LTC128B": 4,
            "LDG.E.LTC128B.128": 16, "LDGSTS.E.BYPASS.LTC128B.128": 16,
        }  # fmt: skip
        for opcode, width in opcodes.items():
            self.assertEqual(listing.Instruction(0, "", opcode, "").bytes, width, opcode)

    def test_tensor_instructions(self):
        for opcode, flops in {
            "HMMA.16816.F32.BF16": 4096,
            "HMMA.1688.F32.TF32": 2048,
            "HGMMA.64x128x16.F32.BF16": 65536,
            "UTCHMMA": 0,
        }.items():
            instruction = listing.Instruction(0, "", opcode, "")
            self.assertTrue(instruction.is_tensor, opcode)
            self.assertEqual(instruction.tensor_flops, flops, opcode)
        self.assertFalse(listing.Instruction(0, "", "HFMA2.MMA", "").is_tensor)

    def test_short_names(self):
        names = {
            "void minillm::kernels::(anonymous namespace)::f<__nv_bfloat16, 8, true>(float*, A<float>)":
                "f<bf16, 8, true>",
            "void minillm::kernels::g<float, (minillm::Mode)2, (bool)1>(B)": "g<fp32, 2, 1>",
            "h(float*)": "h",
        }  # fmt: skip
        for long, short in names.items():
            self.assertEqual(listing.short_name(long), short)


class Loops(unittest.TestCase):
    def test_nested_loops(self):
        expected = {"sm_80": ([0x90, 0x140, 0x3E0], 0x140), "sm_120": ([0xB0, 0x140, 0x430], 0x140)}
        for architecture, (headers, inner) in expected.items():
            flow = ControlFlow(KERNELS[architecture]["nested_kernel"].instructions)
            at = {flow.blocks[h].instructions[0].address: flow.loops[h] for h in flow.loops}
            self.assertEqual(sorted(at), headers)
            rows, columns, last = (at[address] for address in headers)
            self.assertLess(columns, rows)
            self.assertFalse(rows & last)
            hot = [loop.address for loop in pressure.hot_loops(flow) if not loop.whole]
            self.assertEqual(hot, [inner, headers[2]])

    def test_slow_paths_are_outside(self):
        """The subroutine of the square root comes after the kernel's end; a call is not a way into the loop."""
        for architecture in ARCHITECTURES:
            kernel = KERNELS[architecture]["nested_kernel"]
            flow = ControlFlow(kernel.instructions)
            returns = [i.address for i in kernel.instructions if i.name == "RET"]
            self.assertTrue(returns)
            for body in flow.loops.values():
                self.assertLess(max(i.address for i in flow.instructions_of(body)), min(returns))

    def test_straight_code_has_none(self):
        self.assertFalse(ControlFlow(KERNELS["sm_80"]["spill_kernel"].instructions).loops)
        self.assertEqual(ControlFlow([]).heaviest_path(None, lambda i: 1), [])

    def test_a_backward_branch_without_dominance_is_no_loop(self):
        """What compilers make of a slow path that comes after the code and returns into it."""
        code = assemble("@P0 BRA 0x50", "IADD3 R1", "IADD3 R2", "EXIT", "NOP", "IADD3 R3", "BRA 0x20")
        self.assertFalse(ControlFlow(code).loops)

    def test_divergent_slow_paths_are_not_followed(self):
        code = assemble("IADD3 R0", "BRA.DIV UR4, 0x50", "LDG.E R1", "@P0 BRA 0x0", "EXIT", "LDG.E R2", "BRA 0x20")
        flow = ControlFlow(code)
        self.assertEqual(list(flow.loops), [0])
        self.assertEqual(len(flow.instructions_of(flow.loops[0])), 4)

    def test_the_path_with_most_work_and_then_fewest_instructions(self):
        code = assemble(
            "IADD3 R0",
            "@P0 BRA 0x60",  # around the loads
            "@P1 BRA 0x40",  # around a mask
            "ISETP R1",
            "LDG.E.128 R4",
            "FADD R4",
            "@P2 BRA 0x0",
            "EXIT",
        )
        flow = ControlFlow(code)
        path = flow.heaviest_path(0, pressure.WEIGHTS["memory"])
        self.assertEqual([i.name for i in path], ["IADD3", "BRA", "BRA", "LDG", "FADD", "BRA"])

    def test_reconvergence(self):
        """BSYNC goes on where its BSSY says, here back to the top."""
        code = assemble("BSSY B0, 0x10", "LDG.E R0", "@P0 BRA 0x40", "EXIT", "BSSY B1, 0x10", "BSYNC B1", "EXIT")
        self.assertEqual(len(ControlFlow(code).loops), 1)


    def test_what_is_done_once_is_not_hidden_by_a_loop_beside_it(self):
        """Vectors in one branch, a loop over single elements in the other."""
        tail = ["LDG.E R0"] * 8 + ["@P1 BRA 0x40", "EXIT"]
        code = assemble("@P0 BRA 0x40", "LDG.E.128 R0", "IADD3 R1", "EXIT", *tail)
        once = next(loop for loop in pressure.hot_loops(ControlFlow(code)) if loop.whole)
        self.assertEqual(once.wide_bytes(), 16)


class Pressure(unittest.TestCase):
    def loop(self, architecture, name, kind):
        flow = ControlFlow(KERNELS[architecture][name].instructions)
        return next(loop for loop in pressure.hot_loops(flow) if loop.kind == kind and not loop.whole)

    def test_tensor_loop(self):
        """Four products of 4096 flops; LDSM.x4 and .x2 bring 768 B, LDG and STS 128 B each."""
        for architecture, tensor in {"sm_80": 8, "sm_120": 32}.items():
            gpu = pressure.GPUS[architecture]
            loop = self.loop(architecture, "attention_forward_mma_kernel", "tensor")
            share, _, _, cycles = loop.limit(gpu)
            self.assertEqual(loop.work(), 4 * 4096)
            self.assertEqual(cycles["tensor"], tensor)
            self.assertEqual(cycles["L1/shared"], 4 + 2 + 1 + 1)
            self.assertEqual(cycles["issue"], len(loop.path) / 4)
            self.assertEqual(share, 1)

    def test_mma_sync_cannot_reach_the_peak_of_hopper(self):
        loop = self.loop("sm_80", "attention_forward_mma_kernel", "tensor")
        share, pipe, load, _ = loop.limit(dataclasses.replace(pressure.GPUS["sm_90a"], imad=10**6, fp32=10**6, alu=10**6))
        self.assertEqual((pipe, load), ("L1/shared", 1.0))  # 8 cycles against 6.4 of the tensor cores
        self.assertAlmostEqual(share, 4 * 4096 / 4096 / 8)
        narrow = dataclasses.replace(loop, path=[i for i in loop.path if i.is_tensor])
        self.assertAlmostEqual(narrow.limit(pressure.GPUS["sm_90a"])[0], 0.629, places=3)

    def test_memory_loop(self):
        gpu = pressure.GPUS["sm_80"]
        loop = self.loop("sm_80", "wide_kernel<fp32, 4>", "memory")
        self.assertEqual(loop.work(), 32)
        share, _, load, cycles = loop.limit(gpu)
        self.assertEqual(share, 1)
        self.assertAlmostEqual(load, cycles["L1/shared"] / (32 * 32 / gpu.memory_bytes))
        slow = dataclasses.replace(loop, path=loop.path + assemble(*["MUFU.EX2 R0"] * 100))
        share, pipe, load, _ = slow.limit(gpu)
        self.assertEqual((pipe, load), ("xu", 1))
        self.assertAlmostEqual(share, 32 * 32 / gpu.memory_bytes / 200)

    def test_imad_has_half_the_lanes(self):
        cycles = pressure.pipe_cycles(assemble("IMAD R0", "FFMA R0"), pressure.GPUS["sm_90a"])
        self.assertEqual(cycles["fp32"], 0.5)
        cycles = pressure.pipe_cycles(assemble("IMAD R0", "IMAD R0"), pressure.GPUS["sm_90a"])
        self.assertEqual(cycles["fp32"], 1.0)

    def test_peaks_are_those_of_the_data_sheets(self):
        for name, tflops in {"sm_80": 312, "sm_90a": 989, "sm_100": 2250, "sm_120": 209.5}.items():
            gpu = pressure.GPUS[name]
            self.assertAlmostEqual(gpu.multiprocessors * gpu.gigahertz * gpu.tensor_flops / 1000 / tflops, 1, delta=0.005)


class Rules(unittest.TestCase):
    def test_sound_kernels_pass(self):
        for architecture in ARCHITECTURES:
            self.assertEqual(findings([KERNELS[architecture][name] for name in SOUND]), [])

    def test_spills_are_found(self):
        (found,) = findings([KERNELS["sm_80"]["spill_kernel"]])
        self.assertIn("spill_kernel on sm_80: 460 bytes of spills", str(found))
        (found,) = findings([dataclasses.replace(KERNELS["sm_80"]["nested_kernel"], stack=16)])
        self.assertIn("16 bytes of it", str(found))
        # Machine code alone says it as well: ptxas calls an array in local memory no spill.
        kernel = KERNELS["sm_80"]["spill_kernel"]
        self.assertTrue(findings([dataclasses.replace(kernel, spills=0, stack=0)]))

    def test_missing_tensor_instructions_are_found(self):
        for architecture in ARCHITECTURES:
            (found,) = findings([KERNELS[architecture]["attention_backward_key_mma_kernel"]])
            self.assertRegex(str(found), rf"attention_backward_key_mma_kernel on {architecture}: .*HMMA")
        kernel = KERNELS["sm_80"]["attention_backward_key_mma_kernel"]
        self.assertEqual(findings([dataclasses.replace(kernel, name="attention_backward_kernel<fp32, 64>")]), [])
        self.assertTrue(findings([dataclasses.replace(kernel, name="attention_backward_mma_kernel<64, 0>")]))

    def test_narrow_accesses_are_found(self):
        for architecture in ARCHITECTURES:
            loads, stores = findings([KERNELS[architecture]["narrow_kernel<fp32, 4>"]])
            self.assertRegex(str(loads), rf"narrow_kernel<fp32, 4> on {architecture}: .*loads 4 of 4 bytes .*\(LDG\.E\)")
            self.assertRegex(str(stores), r"stores 4 of 4 bytes .*\(STG\.E\)")
        kernel = KERNELS["sm_80"]["narrow_kernel<fp32, 4>"]
        self.assertEqual(findings([dataclasses.replace(kernel, name="narrow_kernel<fp32, 1>")]), [])

    def test_exemptions(self):
        kernel = KERNELS["sm_80"]["narrow_kernel<fp32, 4>"]
        some = tuple(rules.Exemption("^narrow", access, "why") for access in ("loads", "stores"))
        self.assertEqual(len(findings([kernel], some)), 4)  # no 16-byte access at all, and so no need either
        everywhere = tuple(dataclasses.replace(e, everywhere=True) for e in some)
        self.assertEqual(findings([kernel], everywhere), [])
        (found,) = findings([KERNELS["sm_80"]["wide_kernel<fp32, 4>"]], (rules.Exemption("^wide", "loads", "why"),))
        self.assertIn("without need", str(found))

    def test_vector_bytes(self):
        for name, width in {
            "f<bf16, 8, 2>": 16, "f<bf16, 2>": 4, "f<fp32, 4>": 16, "f<4, false>": 16, "f<bf16, fp32, 4>": 16,
            "f<bf16, 128, true>": 256, "f<bf16>": None, "f": None, "f<true>": None,
        }.items():  # fmt: skip
            self.assertEqual(rules.vector_bytes(name), width, name)


class Document(unittest.TestCase):
    def setUp(self):
        self.kernels = [KERNELS[a][name] for a in ARCHITECTURES for name in SOUND]
        self.text = self.write(self.kernels)

    def write(self, kernels, version="13.0.88"):
        return document.document(kernels, [ControlFlow(k.instructions) for k in kernels], version)

    def check(self, committed, kernels, version="13.0.88"):
        """(exit code, what was printed) of --check without the rules' findings about real kernels' exemptions."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "machine-code.md")
            if committed is not None:
                path.write_text(committed)
            lines, failed = sass_report.check_document(self.write(kernels, version), version, path)
        return failed, "\n".join(lines)

    def test_contents(self):
        self.assertIn("nvcc 13.0.88", self.text)
        self.assertRegex(self.text, r"\| `wide_kernel<fp32, 4>` \| 16 22 \| – \| 44 30 \| 1 x 16 B \| 1 x 16 B \| – \|")
        self.assertRegex(self.text, r"\| `attention_forward_mma_kernel` \| tensor \| 16384 flops per warp \| 100%")
        self.assertLessEqual(max(len(line) for line in self.text.splitlines() if not line.startswith("|")), 130)

    def test_an_up_to_date_document_passes(self):
        self.assertEqual(self.check(self.text, self.kernels), (False, ""))

    def test_drift_is_found(self):
        changed = [dataclasses.replace(self.kernels[0], registers=77), *self.kernels[1:]]
        failed, message = self.check(self.text, changed)
        self.assertTrue(failed)
        self.assertIn("scripts/sass_report.py --write docs/machine-code.md", message)
        self.assertIn(f"fixture.cu: `{self.kernels[0].name}` differs", message)
        shorter = dataclasses.replace(self.kernels[1], instructions=self.kernels[1].instructions[:-1])
        self.assertTrue(self.check(self.text, [self.kernels[0], shorter, *self.kernels[2:]])[0])
        failed, message = self.check(self.text, [k for k in self.kernels if k.name != "nested_kernel"])
        self.assertTrue(failed)
        self.assertIn("`nested_kernel` is gone", message)
        self.assertTrue(self.check(self.text.replace("Nothing here", "All here"), self.kernels)[0])

    def test_a_missing_document_fails(self):
        failed, message = self.check(None, self.kernels)
        self.assertTrue(failed)
        self.assertIn("is missing", message)

    def test_another_nvcc_checks_only_the_rules(self):
        changed = [dataclasses.replace(k, registers=77) for k in self.kernels]
        failed, message = self.check(self.text, changed, version="12.8.61")
        self.assertFalse(failed)
        self.assertRegex(message, "nvcc 13.0.88, this is 12.8.61: only the rules were checked")
        self.assertEqual(len(message.splitlines()), 1)

    def test_check_fails_with_findings(self):
        kernels = [KERNELS["sm_80"]["spill_kernel"]]
        errors = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(errors):
            path = Path(folder, "machine-code.md")
            path.write_text(self.write(kernels))
            code = sass_report.check(kernels, [ControlFlow(k.instructions) for k in kernels], "13.0.88", path)
        self.assertEqual(code, 1)
        self.assertTrue(re.search("spill_kernel on sm_80", errors.getvalue()))


if __name__ == "__main__":
    unittest.main()
