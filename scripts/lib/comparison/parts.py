"""What a comparison runs: minillm, and the peer's ranks, from one configuration and one set of initial weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

from .processes import PartFailed, run_group

ROOT = Path(__file__).resolve().parents[3]
PEER = ROOT / "scripts" / "lib" / "fsdp_peer.py"

# Keys that change the training and that the peer follows.
FOLLOWED = {
    "model.vocab_size", "model.dim", "model.n_layers", "model.n_heads", "model.ffn_dim", "model.causal",
    "model.rope_theta", "model.final_norm", "model.norm_eps",
    "train.steps", "train.stop_after", "train.micro_batch", "train.seq_len", "train.seed", "train.grad_clip",
    "train.optimizer.lr", "train.optimizer.beta1", "train.optimizer.beta2", "train.optimizer.eps",
    "train.optimizer.weight_decay", "precision.param", "data.source", "data.path",
}  # fmt: skip
# Keys that do not change what is computed, only how, and those that a comparison sets itself.
FREE = {"model.init", "train.head_chunk", "train.cuda_graph"}
FREE_SECTIONS = ("parallel.", "memory.", "gemm.", "checkpoint.", "metrics.", "profile.")
# Keys of variants that the peer does not have, with the value that means the reference.
NEUTRAL = {
    "model.ffn": ("silu",),
    "model.n_kv_heads": (0, "model.n_heads"),
    "model.attention_bias": (True,),
    "model.tie_embeddings": (False,),
    "train.grad_accumulation": (1,),
    "train.schedule": ("constant",),
    "train.optimizer.name": ("adamw",),
    "precision.reduce": ("fp32",),
    "precision.moments": ("fp32",),
}


class ConfigError(Exception):
    pass


def resolved_config(binary, path, overrides):
    """The configuration with all keys, as minillm itself understands it."""
    if not Path(binary).exists():
        raise ConfigError(f"{binary} does not exist; build it (README.md) or name another with --minillm")
    command = [str(binary), "config", str(path)] + [word for o in overrides for word in ("--set", o)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise ConfigError(f"minillm refuses the configuration:\n{result.stderr.strip()}")
    return json.loads(result.stdout)


def flattened(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def check_supported(config):
    """Throws ConfigError for keys with which the peer would train something else."""
    values = dict(flattened(config))
    for key, value in values.items():
        if key in FOLLOWED or key in FREE or key.startswith(FREE_SECTIONS):
            continue
        allowed = [values.get(a, a) if isinstance(a, str) else a for a in NEUTRAL.get(key, ())]
        if not allowed:
            raise ConfigError(f"the peer does not know the key {key} (value {value!r}); see scripts/lib/minillm_torch.py")
        if value not in allowed:
            choices = " or ".join(repr(a) for a in allowed)
            raise ConfigError(f"{key} is {value!r}; the peer can only do {choices}. Give --set {key}=…")


class Comparison:
    def __init__(self, arguments, config, device, binary, folder):
        self.arguments, self.config, self.device, self.binary, self.folder = arguments, config, device, binary, folder
        self.weights = folder / "initial.safetensors"
        self.failures = []
        self._checked_scale = False

    def attempt(self, name, part):
        """The part's result, or None after it has failed."""
        self.say(f"==> {name}")
        try:
            return part()
        except (PartFailed, OSError, ValueError, KeyError) as error:
            self.failures.append(f"{name}: {error}")
            return None

    def say(self, text):
        print(text, file=sys.stderr, flush=True)

    def run_group(self, commands, log, **options):
        def tell(seconds, line):
            self.say(f"    after {seconds:.0f} s: {line or 'no output yet'}")

        return run_group(commands, self.arguments.timeout, log, tell=tell, **options)

    def write_initial_weights(self):
        self.say("==> initial weights")
        import torch
        from minillm_torch import MiniLLM, Model, initialize_
        from safetensors.torch import save_file

        keys = Model.__dataclass_fields__
        with torch.device("meta"):
            network = MiniLLM(Model(**{k: v for k, v in self.config["model"].items() if k in keys}))
        network.to_empty(device="cpu")
        initialize_(network, torch.Generator().manual_seed(self.config["train"]["seed"]))
        save_file({name: weight.detach() for name, weight in network.named_parameters()}, self.weights)

    def peer(self, name, compiled):
        world = self.arguments.world
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir()
        job = {
            "config": self.config,
            "world": world,
            "device": self.device,
            "steps": self.arguments.steps,
            "compile": compiled,
            "weights": str(self.weights),
            "folder": str(folder),
            "timeout_s": self.arguments.timeout,
            "threads": max(1, (os.cpu_count() or 1) // world),
            "check_scale": not self._checked_scale,
        }
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        commands = [[sys.executable, PEER, path, rank] for rank in range(world)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"])}
        peaks = self.run_group(commands, folder / "log", environment=environment)
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
        result = {key: ranks[0][key] for key in ("step_s", "losses", "grad_norms")}
        # A step ends when its slowest rank does.
        result["step_s"] = [max(times) for times in zip(*(rank["step_s"] for rank in ranks))]
        for key in ("peak_allocated_bytes", "peak_reserved_bytes"):
            if key in ranks[0]:
                result[key] = max(rank[key] for rank in ranks)
        result["peak_rss_bytes"] = max(peaks)
        if "single_process" in ranks[0]:
            result["single_process"] = ranks[0]["single_process"]
            self._checked_scale = True
        return result

    def minillm(self):
        arguments = self.arguments
        logs = self.folder / "minillm-log"
        logs.mkdir()
        settings = {
            "model.init": self.weights,
            "train.steps": max(self.config["train"]["steps"], arguments.steps),
            "train.stop_after": arguments.steps,
            "checkpoint.dir": '""',
        }
        command = [Path(self.binary).resolve(), "train", Path(arguments.config).resolve(), "--log-dir", logs]
        command += [word for override in arguments.overrides for word in ("--set", override)]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        if arguments.world > 1:
            command = [ROOT / "scripts" / "mpirun.sh", "-np", arguments.world, *command]
        peaks = self.run_group([command], logs / "log", directory=os.getcwd())
        steps = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
        if len(steps) != arguments.steps:
            raise PartFailed(f"metrics.jsonl has {len(steps)} steps instead of {arguments.steps}")
        result = {
            "step_s": [step["step_s"] for step in steps],
            "losses": [step["loss"] for step in steps],
            "grad_norms": [step["grad_norm"] for step in steps],
            "peak_allocated_bytes": max(step["peak_vram_bytes"] for step in steps),
            "peak_rss_bytes": max(peaks),
        }
        return result
