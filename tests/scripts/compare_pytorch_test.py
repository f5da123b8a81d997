#!/usr/bin/env python3
"""scripts/compare_pytorch.py: its parts, which need no PyTorch, and whole comparisons of a tiny model on the CPU.

    compare_pytorch_test.py MINILLM    with a Python that has scripts/lib/requirements-compare.txt

Without those packages, or without MINILLM, the whole comparisons are left out, and the reason is printed.
"""

import argparse
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))
from comparison import checks, parts, processes, report  # noqa: E402

MINILLM = None
MISSING = [name for name in ("numpy", "torch", "safetensors") if importlib.util.find_spec(name) is None]

MODEL = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 128}
OPTIMIZER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
TRAIN = {"steps": 4, "micro_batch": 2, "seq_len": 16, "seed": 3, "optimizer": OPTIMIZER}


def alive(marker):
    """Processes with `marker` on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


class Processes(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.log = Path(self.folder.name, "log")
        # A name that no other process has on its command line.
        self.marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"

    def shell(self, script):
        return ["bash", "-c", script, self.marker]

    def test_success_reports_the_peak_memory_of_each(self):
        big = [sys.executable, "-c", "x = b'1' * 200_000_000"]
        small, large = processes.run_group([self.shell("true"), big], 60, self.log)
        self.assertGreater(large, 200e6)
        self.assertLess(small, 50e6)

    def test_the_memory_of_who_starts_it_does_not_count(self):
        ballast = bytes(range(256)) * 1_000_000  # of this process, as PyTorch is
        (peak,) = processes.run_group([["sleep", "0.1"]], 60, self.log)
        self.assertLess(peak, 50e6)
        self.assertEqual(len(ballast), 256_000_000)

    def test_a_part_that_takes_time_tells_what_it_does(self):
        told = []
        script = "echo step 1; sleep 0.6; echo step 2; sleep 0.6"
        processes.run_group([self.shell(script)], 60, self.log, tell=lambda *what: told.append(what), every=0.2)
        self.assertGreaterEqual(len(told), 2)
        self.assertEqual([seconds for seconds, _ in told], sorted(seconds for seconds, _ in told))
        self.assertLessEqual({line for _, line in told}, {"", "step 1", "step 2"})
        self.assertIn("step", told[-1][1])

    def test_memory_of_descendants_counts(self):
        (peak,) = processes.run_group([self.shell(f"'{sys.executable}' -c \"x = b'1' * 200_000_000\"; true")], 60, self.log)
        self.assertGreater(peak, 200e6)

    def test_one_failure_ends_all_with_their_descendants(self):
        start = time.monotonic()
        with self.assertRaisesRegex(processes.PartFailed, "(?s)process 1 of 2 returned 7.*the reason"):
            hanging = self.shell(f"bash -c 'sleep 1000; true' {self.marker} & wait")
            processes.run_group([hanging, self.shell("sleep 0.3; echo the reason; exit 7")], 60, self.log)
        self.assertLess(time.monotonic() - start, 10)
        self.assertEqual(alive(self.marker), [])

    def test_the_time_limit_ends_also_what_ignores_signals(self):
        with self.assertRaisesRegex(processes.PartFailed, "did not end within 0.5 s"):
            stubborn = f"trap '' TERM; bash -c 'trap \"\" TERM; sleep 1000; true' {self.marker}; true"
            processes.run_group([self.shell(stubborn)], 0.5, self.log)
        self.assertEqual(alive(self.marker), [])

    def test_a_process_killed_by_a_signal_is_a_failure(self):
        with self.assertRaisesRegex(processes.PartFailed, "returned -9"):
            processes.run_group([self.shell("kill -9 $$")], 60, self.log)


def result(loss=4.0, norm=1.0, single=None):
    steps = {"step_s": [9.0, 1.0, 2.0, 3.0], "losses": [loss] * 4, "grad_norms": [norm] * 4, "peak_rss_bytes": 2 * 10**9}
    return {**steps, **({"single_process": single} if single else {})}


class Checks(unittest.TestCase):
    config = {"model": MODEL, "train": TRAIN, "precision": {"param": "bf16"}}
    single = {"loss": 4.0, "grad_norm": 1.0}

    def test_agreement(self):
        results = {"FSDP2 eager": result(4.01, 1.01, self.single), "minillm": result()}
        self.assertEqual(checks.first_step(self.config, results), [])

    def test_a_gradient_that_was_summed_instead_of_averaged(self):
        results = {"FSDP2 eager": result(norm=2.0, single=self.single), "FSDP2 compiled": result(), "minillm": result(norm=2.0)}
        (message,) = checks.first_step(self.config, results)
        self.assertRegex(message, "gradient norm .* 2 in FSDP2 eager and 1 in a single process .*a factor of 2,")

    def test_each_program_is_checked(self):
        for broken in ("FSDP2 compiled", "minillm"):
            results = {"FSDP2 eager": result(single=self.single), "FSDP2 compiled": result(), "minillm": result()}
            results[broken] = result(loss=4.2)
            (message,) = checks.first_step(self.config, results)
            self.assertIn(f"4.2 in {broken}", message)

    def test_values_that_are_not_finite_do_not_agree(self):
        for value in (None, float("nan"), float("inf")):
            results = {"FSDP2 eager": result(single=self.single), "minillm": result(loss=value)}
            self.assertEqual(len(checks.first_step(self.config, results)), 1)

    def test_failed_parts_are_left_out(self):
        self.assertEqual(checks.first_step(self.config, {"FSDP2 eager": None, "minillm": result()}), [])


class Report(unittest.TestCase):
    config = Checks.config

    def test_medians_ratios_and_failures(self):
        arguments = argparse.Namespace(config="c.json", steps=4, warmup=1, world=2)
        own = {**result(), "step_s": [9.0, 1.0, 1.0, 1.0], "peak_rss_bytes": 10**9}
        results = {"minillm": own, "FSDP2 eager": result(), "FSDP2 compiled": None}
        text = report.table(self.config, arguments, "cpu", results)
        rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
        self.assertEqual(rows["FSDP2 eager"][2:4], ["2", "s"])  # the median of 1, 2, 3
        self.assertEqual(rows["FSDP2 eager"][-2:], ["2.00x", "0.50x"])
        self.assertEqual(rows["FSDP2 compiled"][2:], ["failed"])
        self.assertIn("simulated device", text)
        self.assertNotIn("simulated device", report.table(self.config, arguments, "cuda", {"minillm": None}))


class Configuration(unittest.TestCase):
    def test_keys_that_the_peer_follows(self):
        parts.check_supported({"model": {**MODEL, "n_kv_heads": 2}, "train": TRAIN, "memory": {"recompute": "block"}})

    def test_every_key_of_the_repositorys_configurations(self):
        if MINILLM is None:
            self.skipTest("no MINILLM was given")
        for path in sorted((ROOT / "configs").glob("*.json")):
            parts.check_supported(parts.resolved_config(MINILLM, path, []))

    def test_keys_that_it_does_not(self):
        for section, key, value, message in (
            ("model", "window", 4, "does not know the key model.window"),
            ("model", "n_kv_heads", 1, "model.n_kv_heads is 1; the peer can only do 0 or 2"),
            ("train", "grad_accumulation", 2, "can only do 1"),
        ):
            config = {"model": dict(MODEL), "train": dict(TRAIN)}
            config[section][key] = value
            with self.assertRaisesRegex(parts.ConfigError, message):
                parts.check_supported(config)


@unittest.skipIf("numpy" in MISSING, "numpy is not installed")
class Data(unittest.TestCase):
    def test_philox(self):
        """The known answers of its authors' Random123 library."""
        import minillm_data

        most = 2**64 - 1
        for seed, stream, counter, words in (
            (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
            (most, most, most, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
            (0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88, "d16cfe09 94fdcceb 5001e420 24126ea1"),
        ):
            found = minillm_data.philox(seed, stream, [counter])[:, 0]
            self.assertEqual(" ".join(f"{int(word):08x}" for word in found), words)

    def test_permutations(self):
        import minillm_data

        for count in (1, 2, 5, 17, 100):
            image = [minillm_data.permute(i, count, 7) for i in range(count)]
            self.assertEqual(sorted(image), list(range(count)))


class Minillm(unittest.TestCase):
    """The part that runs minillm, with stand-ins for it."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def run_fake(self, script, world=1, timeout=60):
        binary = Path(self.folder.name, "minillm")
        binary.write_text(f"#!/bin/bash\n{script}\n")
        binary.chmod(0o755)
        arguments = argparse.Namespace(config="c.json", steps=2, world=world, timeout=timeout, overrides=[])
        comparison = parts.Comparison(arguments, {"train": TRAIN}, "cpu", binary, Path(self.folder.name))
        return comparison.attempt("minillm", comparison.minillm), comparison.failures

    def test_metrics_are_read(self):
        line = '{"step":%d,"loss":4.5,"peak_vram_bytes":77,"step_s":0.5,"grad_norm":null}'
        script = "while (($#)); do [[ $1 == --log-dir ]] && log=$2; shift; done\n"
        script += f"echo '{line % 0}' >$log/metrics.jsonl; echo '{line % 1}' >>$log/metrics.jsonl"
        result, failures = self.run_fake(script)
        self.assertEqual(failures, [])
        self.assertEqual((result["losses"], result["grad_norms"]), ([4.5, 4.5], [None, None]))
        self.assertEqual(result["peak_allocated_bytes"], 77)

    def test_missing_metrics_are_a_failure(self):
        result, failures = self.run_fake("true")
        self.assertIsNone(result)
        self.assertRegex(failures[0], "minillm: .*metrics.jsonl")

    @unittest.skipIf(shutil.which("mpirun") is None, "there is no mpirun")
    def test_hanging_ranks_are_ended(self):
        duration = f"1000.{os.getpid()}"  # to be recognised by
        result, failures = self.run_fake(f"sleep {duration}", world=2, timeout=3)
        self.assertIsNone(result)
        self.assertRegex(failures[0], "minillm: it did not end within 3 s")
        self.assertEqual(alive(duration), [])


class Whole(unittest.TestCase):
    def setUp(self):
        if MISSING:
            self.skipTest(f"not installed: {', '.join(MISSING)} (scripts/lib/requirements-compare.txt)")
        if MINILLM is None:
            self.skipTest("no MINILLM was given")
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def compare(self, train, *options, minillm=None, model=None, **sections):
        config, found = Path(self.folder.name, "config.json"), Path(self.folder.name, "result.json")
        config.write_text(json.dumps({"model": {**MODEL, **(model or {})}, "train": {**TRAIN, **train}, **sections}))
        command = [sys.executable, ROOT / "scripts" / "compare_pytorch.py", config, "--device", "cpu", "--no-compile"]
        command += ["--minillm", minillm or MINILLM, "--json", found, *options]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=200)
        return done, json.loads(found.read_text()) if found.exists() else None

    def fake(self, train):
        """A minillm that tells its configuration and then does `train`."""
        path = Path(self.folder.name, "fake-minillm")
        path.write_text(f'#!/bin/bash\n[[ $1 == config ]] && exec "{Path(MINILLM).resolve()}" "$@"\n{train}\n')
        path.chmod(0o755)
        return path

    def assert_same_losses(self, found, tolerance):
        for ours, theirs in zip(found["parts"]["minillm"]["losses"], found["parts"]["FSDP2 eager"]["losses"], strict=True):
            self.assertAlmostEqual(ours / theirs, 1, delta=tolerance)

    def test_two_ranks_on_text(self):
        """In fp32, so that every loss says whether tokens, weights, clipping and AdamW are the same. The text is an
        epoch and a half long."""
        text = Path(self.folder.name, "text")
        text.write_bytes(bytes(i * i % 61 for i in range(16 * 16 + 1)))
        model = {"causal": True, "rope_theta": 10000, "final_norm": True}
        done, found = self.compare(
            {"steps": 6, "grad_clip": 0.5}, "--steps", 6, "--world", 2, model=model,
            data={"source": "text", "path": str(text)}, precision={"param": "fp32"},
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assert_same_losses(found, 1e-4)
        self.assertGreater(found["parts"]["minillm"]["grad_norms"][0], 0.5)  # or nothing would be clipped
        self.assertEqual(len(found["parts"]["FSDP2 eager"]["step_s"]), 6)

    def test_one_rank_on_random_tokens(self):
        done, found = self.compare({}, "--steps", 4, precision={"param": "bf16"})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assert_same_losses(found, 0.002)
        self.assertIn("FSDP2 eager", done.stdout)
        # Losses that were rounded to bf16 would have the last 16 bits of an fp32 zero.
        for loss in found["parts"]["FSDP2 eager"]["losses"]:
            self.assertNotEqual(struct.unpack("<I", struct.pack("<f", loss))[0] & 0xFFFF, 0)
        # Not the size of the Python that has imported PyTorch and started it.
        parts = found["parts"]
        self.assertLess(parts["minillm"]["peak_rss_bytes"], parts["FSDP2 eager"]["peak_rss_bytes"] / 2)

    def test_a_failing_minillm_leaves_the_peers_results(self):
        done, found = self.compare({}, "--steps", 2, minillm=self.fake("echo no luck; exit 5"))
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"minillm +failed")
        self.assertRegex(done.stdout, r"FSDP2 eager +[\d.]+ s")
        self.assertRegex(done.stderr, r"(?s)minillm: process 0 of 1 returned 5.*no luck")
        self.assertEqual(len(found["problems"]), 1)

    def test_usage(self):
        done, _ = self.compare({}, "--steps", 1)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--steps is 1; at least 2", done.stderr)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-") and os.access(sys.argv[1], os.X_OK):
        MINILLM = sys.argv.pop(1)
    unittest.main(verbosity=2)
