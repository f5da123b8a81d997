"""One rank of the peer: the reference MiniLLM under FSDP2, as PyTorch's users run it. compare_pytorch.py starts it:

    fsdp_peer.py JOB.json RANK        writes <job.folder>/rank<RANK>.json

A unit per layer and one for the rest, bf16 compute, fp32 gradient reduction, fused AdamW, cross-entropy over the global
number of valid targets. Before the run rank 0 computes the loss and the gradient norm of the first step without FSDP;
FSDP averages gradients, which gloo has been known not to do, and a wrong scale hides behind AdamW.
"""

import json
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from minillm_data import make_source, read_batch
from minillm_torch import IGNORED, MiniLLM, Model
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Rank:
    def __init__(self, job, rank):
        self.job, self.rank, self.world = job, rank, job["world"]
        self.config = job["config"]
        self.cuda = job["device"] == "cuda"
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.dtype = DTYPES[self.config["precision"]["param"]]
        if self.cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(job["threads"])
        self.source = make_source(self.config)

    def batch(self, step, rank):
        arrays = read_batch(self.source, step, self.world, rank, self.config["train"]["micro_batch"])
        return tuple(torch.from_numpy(array).to(self.device) for array in arrays)

    def new_model(self):
        keys = Model.__dataclass_fields__
        model = Model(**{key: value for key, value in self.config["model"].items() if key in keys})
        with torch.device("meta"):
            network = MiniLLM(model)
        network.load_state_dict(load_file(self.job["weights"], device=str(self.device)), assign=True)
        return network.requires_grad_()

    def log(self, text):
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)


def loss_of(logits, targets, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def exact_loss_sum(logits, targets, rows=1024):
    """The sum of the losses of bf16 logits in fp32, which a bf16 loss, three digits, only hints at: for the report. A few
    rows at a time: beside the loss's backward pass, which has three times all logits, it takes no memory."""
    parts = zip(logits.detach().flatten(0, 1).split(rows), targets.flatten().split(rows))
    return sum(F.cross_entropy(part.float(), wanted, ignore_index=IGNORED, reduction="sum") for part, wanted in parts)


def single_process_step(rank):
    """(loss, gradient norm) of step 0 of all ranks' sequences, computed here, one rank's batch at a time. Weights and
    activations are in the compute type, gradients are added in fp32: what FSDP is meant to do."""
    model = rank.new_model()
    masters = list(model.parameters())
    compute = [p.detach().to(rank.dtype).requires_grad_() for p in masters]
    names = [name for name, _ in model.named_parameters()]
    gradients = [torch.zeros_like(p) for p in masters]
    loss, valid = 0.0, 0
    for r in range(rank.world):
        rank.log(f"  the first step without FSDP, batch {r + 1} of {rank.world}")
        tokens, targets = rank.batch(0, r)
        logits = torch.func.functional_call(model, dict(zip(names, compute)), (tokens,))
        part = loss_of(logits, targets, "sum")
        exact = exact_loss_sum(logits, targets)
        for total, gradient in zip(gradients, torch.autograd.grad(part, compute)):
            total += gradient
        loss += exact.item()
        valid += (targets != IGNORED).sum().item()
    norm = torch.stack([g.double().norm() for g in gradients]).norm().item()
    return loss / valid, norm / valid


class Peer:
    def __init__(self, rank):
        self.rank, train = rank, rank.config["train"]
        self.model = rank.new_model()
        policy = MixedPrecisionPolicy(param_dtype=rank.dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(rank.job["device"], (rank.world,))
        self.loss = loss_of
        if rank.job["compile"]:
            self.loss = torch.compile(loss_of)
            for layer in self.model.layers:
                layer.compile()
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        options = train["optimizer"]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=options["lr"],
            betas=(options["beta1"], options["beta2"]),
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            fused=True,
        )
        self.clip = train["grad_clip"]

        # Made before the clock runs, as a data loader would.
        self.batches = [rank.batch(step, rank.rank) for step in range(rank.job["steps"])]

    def step(self, number, clock):
        """(mean loss over all ranks, gradient norm or None): on the device, nothing waits for them. What is only for the
        report is left out of the clock's time."""
        tokens, targets = self.batches[number]
        mine = (targets != IGNORED).sum()
        everyones = mine.clone()
        dist.all_reduce(everyones)
        # FSDP averages gradients over the ranks; with equal numbers of targets the weight is exactly 1.
        logits = self.model(tokens)
        loss = self.loss(logits, targets) * (self.rank.world * mine / everyones)
        with clock.stopped():
            mean = exact_loss_sum(logits, targets) / everyones
            del logits  # or its memory would last through the backward pass
        loss.backward()
        norm = None
        if self.clip > 0 or number == 0:
            largest = self.clip if self.clip > 0 else float("inf")
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest)
            norm = norm.full_tensor() if number == 0 else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(mean)
        return mean, norm


class Clock:
    """The times at which the steps end on the device, without making the host wait on CUDA."""

    def __init__(self, cuda):
        self._cuda, self._marks, self._stops = cuda, [], []

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self):
        self._marks.append(self._now())
        self._stops.append([])  # of the step that begins

    @contextmanager
    def stopped(self):
        """What is enqueued within does not count as the step's."""
        begin = self._now()
        yield
        self._stops[-1].append((begin, self._now()))

    def _between(self, begin, end):
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin

    def seconds(self):
        if self._cuda:
            torch.cuda.synchronize()
        return [
            self._between(begin, end) - sum(self._between(*stop) for stop in stops)
            for begin, end, stops in zip(self._marks, self._marks[1:], self._stops)
        ]


def train(rank):
    peer = Peer(rank)
    if rank.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock, losses, norms = Clock(rank.cuda), [], []
    clock.mark()
    for step in range(rank.job["steps"]):
        loss, norm = peer.step(step, clock)
        clock.mark()
        losses.append(loss)
        norms.append(norm)
        if not rank.cuda:
            rank.log(f"  peer step {step} | loss {loss.item():.4f}")
    result = {
        "step_s": clock.seconds(),
        "losses": [loss.item() for loss in losses],
        "grad_norms": [None if norm is None else norm.item() for norm in norms],
    }
    if rank.cuda:
        result["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        result["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return result


def main():
    job_path, number = sys.argv[1:]
    job = json.loads(Path(job_path).read_text())
    rank = Rank(job, int(number))
    result = {}
    if job["check_scale"] and rank.rank == 0:
        result["single_process"] = dict(zip(("loss", "grad_norm"), single_process_step(rank)))
    dist.init_process_group(
        "nccl" if rank.cuda else "gloo",
        init_method=f"file://{job['folder']}/rendezvous",
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=job["timeout_s"]),
    )
    result |= train(rank)
    Path(job["folder"], f"rank{rank.rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
