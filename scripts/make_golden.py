#!/usr/bin/env python3
"""Makes tests/parity/golden/*.safetensors: losses, gradients and AdamW steps of PyTorch for the parity tests.

    python3 -m venv golden && golden/bin/pip install -r scripts/requirements-golden.txt
    golden/bin/python scripts/make_golden.py

Versions: torch 2.15.0 and numpy 2.4.6 on the CPU with one thread. Everything is seeded; a second run on the same
machine gives the same bytes. tests/parity/README.md describes the contents.

The truth is a float64 run. The same model is run again in fp32 and in bf16 (as FSDP2 runs it with
param_dtype=bf16, reduce_dtype=fp32) and only its distance from the truth is kept: what PyTorch itself loses to
rounding is the yardstick for the tolerances of the tests.
"""

import argparse
import json
import math
import struct
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
from minillm_torch import IGNORED, Model, empty_model  # noqa: E402

STEPS, BATCH, SEQUENCE = 5, 12, 12  # 12 sequences: 1, 2, 3 and 4 ranks get equal shares
OPTIMIZER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


TINY = {"vocab_size": 37, "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 128}
VARIANTS = {
    "reference": Model(**TINY),
    "llama": Model(**TINY, causal=True, rope_theta=10000.0, final_norm=True),
}


def initial_parameters(model, generator):
    """Norm weights away from 1 and biases away from 0, so that leaving one out or misplacing it shows."""
    C, F_, V = model.dim, model.ffn_dim, model.vocab_size

    def uniform(*shape, low, high):
        return torch.rand(*shape, generator=generator) * (high - low) + low

    def linear(rows, columns):
        bound = 1 / math.sqrt(columns)
        return uniform(rows, columns, low=-bound, high=bound)

    parameters = {"embedding.weight": torch.randn(V, C, generator=generator)}
    for i in range(model.n_layers):
        parameters |= {
            f"layers.{i}.norm1.weight": uniform(C, low=0.5, high=1.5),
            f"layers.{i}.attn.in_proj_weight": uniform(3 * C, C, low=-1, high=1) * math.sqrt(6 / (4 * C)),
            f"layers.{i}.attn.in_proj_bias": uniform(3 * C, low=-0.5, high=0.5),
            f"layers.{i}.attn.out_proj.weight": linear(C, C),
            f"layers.{i}.attn.out_proj.bias": uniform(C, low=-0.5, high=0.5),
            f"layers.{i}.norm2.weight": uniform(C, low=0.5, high=1.5),
            f"layers.{i}.ffn.up.weight": linear(F_, C),
            f"layers.{i}.ffn.down.weight": linear(C, F_),
        }
    if model.final_norm:
        parameters["final_norm.weight"] = uniform(C, low=0.5, high=1.5)
    parameters["head.weight"] = linear(V, C)
    return parameters


def batches(model, generator, ignore):
    """Tokens and targets [STEPS, BATCH, SEQUENCE]. With `ignore`, sequence b of step s leaves out (5 b + 3 s) mod 9
    targets: ranks then hold unequal numbers of valid ones, so a mean of per-rank means is not the global mean."""
    tokens = torch.randint(model.vocab_size, (STEPS, BATCH, SEQUENCE), generator=generator)
    targets = torch.randint(model.vocab_size, (STEPS, BATCH, SEQUENCE), generator=generator)
    if ignore:
        for s in range(STEPS):
            for b in range(BATCH):
                left_out = torch.randperm(SEQUENCE, generator=generator)[: (5 * b + 3 * s) % 9]
                targets[s, b, left_out] = IGNORED
    return tokens, targets


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@dataclass
class Run:
    """What a training run leaves, in float64."""

    losses: torch.Tensor  # [STEPS + 1] before each step, and of batch 0 after the last
    wide_losses: torch.Tensor  # [STEPS + 1] the same logits, but their cross-entropy in float64
    gradients: dict  # of step 0
    after: dict  # parameters after STEPS updates


def train(model, initial, tokens, targets, master, compute):
    """STEPS AdamW steps on parameters of type `master` with losses and gradients computed in type `compute`."""
    parameters = {name: value.to(master).clone() for name, value in initial.items()}
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=OPTIMIZER["lr"],
        betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]),
        eps=OPTIMIZER["eps"],
        weight_decay=OPTIMIZER["weight_decay"],
        foreach=False,
    )
    network = empty_model(model)
    losses, wide_losses, first_gradients = [], [], None
    for step in range(STEPS + 1):
        batch = step % STEPS
        weights = {name: value.detach().to(compute).requires_grad_() for name, value in parameters.items()}
        logits = functional_call(network, weights, (tokens[batch],))
        loss = loss_of(logits, targets[batch])
        losses.append(loss.item())
        wide_losses.append(loss_of(logits.detach().double(), targets[batch]).item())
        if step == STEPS:
            break
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for value, gradient in zip(parameters.values(), gradients):
            value.grad = gradient.to(master)
        if first_gradients is None:
            first_gradients = {name: value.grad.double() for name, value in parameters.items()}
        optimizer.step()
    after = {name: value.double() for name, value in parameters.items()}
    return Run(*(torch.tensor(x, dtype=torch.float64) for x in (losses, wide_losses)), first_gradients, after)


def relative_error(value, truth):
    return ((value - truth).norm() / truth.norm()).reshape(1)


def gradient_errors(run, truth):
    """‖gradient - truth‖ / ‖truth‖ per tensor, L2."""
    return {name: relative_error(run.gradients[name], exact) for name, exact in truth.gradients.items()}


def update_errors(model, run, truth, initial):
    """‖moved - truth moved‖ / ‖truth moved‖ per tensor, L2, moved = parameter after - before.

    Without position encoding a key bias adds the same number to all scores of a query, which the softmax ignores:
    its true gradient is 0, and AdamW blows the rounding noise up to whole steps. Those rows are left out."""
    errors = {}
    for name, exact in truth.after.items():
        start = initial[name].double()
        moved, true_moved = run.after[name] - start, exact - start
        if name.endswith("in_proj_bias") and not model.rope_theta:
            rows = torch.arange(3 * model.dim) // model.dim != 1
            moved, true_moved = moved[rows], true_moved[rows]
        errors[name] = relative_error(moved, true_moved)
    return errors


def golden(name, model):
    generator = torch.Generator().manual_seed(1234)
    initial = initial_parameters(model, generator)
    tokens, targets = batches(model, generator, ignore=name == "llama")

    def run(master, compute):
        return train(model, initial, tokens, targets, master, compute)

    truth = run(torch.float64, torch.float64)
    fp32 = run(torch.float32, torch.float32)
    bf16 = run(torch.float32, torch.bfloat16)

    tensors = {
        "tokens": tokens,
        "targets": targets,
        "losses": truth.losses,
        "fp32_losses": fp32.losses,
        "bf16_losses": bf16.losses[:STEPS],
        "bf16_logits_losses": bf16.wide_losses[:STEPS],
    }
    groups = {
        "init": initial,
        "grad": truth.gradients,
        "after": truth.after,
        "fp32_grad_error": gradient_errors(fp32, truth),
        "fp32_after_error": update_errors(model, fp32, truth, initial),
        "bf16_grad_error": gradient_errors(bf16, truth),
    }
    for group, members in groups.items():
        tensors |= {f"{group}/{key}": value for key, value in members.items()}
    return {key: value.to(torch.float32).contiguous() for key, value in tensors.items()}


def save(path, tensors, metadata):
    """The safetensors package writes metadata in a random order; this writes the same format, always the same bytes."""
    header, data = {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        piece = tensor.numpy().astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def report(name, tensors):
    print(f"{name}: losses {[round(x, 4) for x in tensors['losses'].tolist()]}")
    for key in ("fp32_losses", "bf16_losses", "bf16_logits_losses"):
        deviation = (tensors[key] - tensors["losses"][: tensors[key].numel()]).abs().max().item()
        print(f"  {key}: off by at most {deviation:.1e}")
    for group in ("fp32_grad_error", "fp32_after_error", "bf16_grad_error"):
        errors = {key.split("/")[1]: value.item() for key, value in tensors.items() if key.startswith(group + "/")}
        worst = max(errors, key=errors.get)
        print(f"  {group}: {min(errors.values()):.1e} to {errors[worst]:.1e} ({worst})")


def main():
    parser = argparse.ArgumentParser(description="Make the golden files of the parity tests.")
    default = Path(__file__).resolve().parent.parent / "tests" / "parity" / "golden"
    parser.add_argument("--output", type=Path, default=default, metavar="DIR", help="where to write (%(default)s)")
    output = parser.parse_args().output

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    output.mkdir(parents=True, exist_ok=True)
    for name, model in VARIANTS.items():
        tensors = golden(name, model)
        metadata = {"model": json.dumps(asdict(model)), "optimizer": json.dumps(OPTIMIZER)}
        save(output / f"{name}.safetensors", tensors, metadata)
        report(name, tensors)


if __name__ == "__main__":
    main()
