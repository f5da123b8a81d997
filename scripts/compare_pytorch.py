#!/usr/bin/env python3
"""Trains the same model on the same tokens with PyTorch FSDP2 and with minillm, and prints both side by side.

    python3 -m venv compare && compare/bin/pip install -r scripts/lib/requirements-compare.txt
    compare/bin/python scripts/compare_pytorch.py configs/minillm.json --steps 20 --world 8

The peer is scripts/lib/fsdp_peer.py: fully_shard on every layer and on the root, bf16 compute, fp32 gradient reduction,
fused AdamW; eager, then with torch.compile. Both start from the same weights, drawn by PyTorch and given to minillm as
model.init, and read the same sequences: losses and gradient norms of the first step must agree, and the peer's must
agree with those of a single process without FSDP. On CUDA ranks use NCCL, on the CPU gloo, and minillm its simulated
device: its speed there says nothing about a GPU's.

Returns 0; 1 when a part failed, ran into its time limit or the first step disagrees (what the others found is printed
all the same); 2 for a wrong command line or configuration.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
from comparison import checks, parts, report  # noqa: E402


def usage_error(message):
    print(f"compare_pytorch: {message}", file=sys.stderr)
    sys.exit(2)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", help="a configuration of minillm")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (%(default)s)")
    parser.add_argument("--warmup", type=int, help="steps left out of the medians (a quarter of --steps, at least 1)")
    parser.add_argument("--world", type=int, default=1, help="ranks (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where PyTorch finds a GPU")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="overrides a key of CONFIG, for both")  # fmt: skip
    parser.add_argument("--minillm", type=Path, metavar="PATH", help="default: build/cuda/minillm or build/sim/minillm")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction,
                        help="only the compiled peer, or only the eager one; default: both")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that each part may take (%(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        usage_error(f"--steps is {arguments.steps}; at least 2, since the first is warm-up")
    if arguments.warmup is None:
        arguments.warmup = max(1, arguments.steps // 4)
    if not 1 <= arguments.warmup < arguments.steps:
        usage_error(f"--warmup is {arguments.warmup}; from 1 to --steps - 1 = {arguments.steps - 1}")
    if arguments.world < 1:
        usage_error(f"--world is {arguments.world}; at least 1")
    return arguments


def choose_device(arguments, torch):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = arguments.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and gpus < arguments.world:
        usage_error(f"--world is {arguments.world}, but PyTorch finds {gpus} GPU(s); give --device cpu or fewer ranks")
    return device


def main():
    arguments = parse_arguments()
    try:
        import safetensors  # noqa: F401
        import torch
    except ImportError as missing:
        usage_error(f"{missing}. Install what scripts/lib/requirements-compare.txt lists and run this with that Python")
    device = choose_device(arguments, torch)
    binary = arguments.minillm or parts.ROOT / "build" / ("cuda" if device == "cuda" else "sim") / "minillm"
    try:
        config = parts.resolved_config(binary, arguments.config, arguments.overrides)
        parts.check_supported(config)
    except parts.ConfigError as error:
        usage_error(str(error))

    modes = [False, True] if arguments.compile is None else [arguments.compile]
    results = {"minillm": None}
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        run = parts.Comparison(arguments, config, device, binary, Path(folder))
        run.write_initial_weights()
        for compiled in modes:
            name = "FSDP2 compiled" if compiled else "FSDP2 eager"
            results[name] = run.attempt(name, lambda compiled=compiled, name=name: run.peer(name, compiled))
        results["minillm"] = run.attempt("minillm", run.minillm)

    problems = run.failures + checks.first_step(config, results)
    print(report.table(config, arguments, device, results))
    for problem in problems:
        print(f"compare_pytorch: {problem}", file=sys.stderr)
    if arguments.json:
        document = report.as_json(config, arguments, device, results, problems)
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
