"""The table and the JSON document of a comparison."""

import statistics
from datetime import datetime, timezone

LABELS = {"peak_allocated_bytes": "device memory allocated", "peak_rss_bytes": "host memory (max RSS)"}


def summary(config, arguments, result):
    """Medians after the warm-up, and sums per rank."""
    step = statistics.median(result["step_s"][arguments.warmup :])
    tokens = config["train"]["micro_batch"] * config["train"]["seq_len"]
    return {"median_step_s": step, "tokens_per_s_per_rank": tokens / step}


def memory_key(device):
    """What both programs can be compared by. minillm's simulated device is host memory, and so is all of PyTorch's."""
    return "peak_allocated_bytes" if device == "cuda" else "peak_rss_bytes"


def shown(value, pattern):
    """minillm writes null for what is not finite."""
    return "not finite" if value is None else format(value, pattern)


def row_of(name, config, arguments, device, result, own):
    if result is None:
        return [name, "failed"] + [""] * 7
    numbers = summary(config, arguments, result)
    memory = result[memory_key(device)]
    norm = result["grad_norms"][0]
    row = [
        name,
        f"{numbers['median_step_s']:.4g} s",
        f"{numbers['tokens_per_s_per_rank']:.4g}",
        f"{memory / 1e9:.3f} GB",
        shown(result["losses"][0], ".4f"),
        shown(result["losses"][-1], ".4f"),
        shown(norm, ".4g"),
    ]
    if own is None or result is own:
        return row + ["", ""]
    ours = summary(config, arguments, own)
    speed = ours["tokens_per_s_per_rank"] / numbers["tokens_per_s_per_rank"]
    return row + [f"{speed:.2f}x", f"{own[memory_key(device)] / memory:.2f}x"]


def table(config, arguments, device, results):
    model, train = config["model"], config["train"]
    last = arguments.steps - 1
    rows = [
        ["", "step", "tok/s/rank", "peak memory", "loss 0", f"loss {last}", "grad norm 0", "minillm speed", "memory"]
    ]
    names = [name for name in results if name != "minillm"] + ["minillm"]
    rows += [row_of(name, config, arguments, device, results[name], results["minillm"]) for name in names]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        f"{arguments.config}: dim {model['dim']}, {model['n_layers']} layers, "
        f"{train['micro_batch']} x {train['seq_len']} tokens per rank, {config['precision']['param']}, "
        f"{arguments.world} rank(s), {device}",
        f"Same initial weights (drawn by PyTorch, read by minillm), same tokens. Medians of steps "
        f"{arguments.warmup} to {last}; speed and memory of minillm divided by the peer's; "
        f"{LABELS[memory_key(device)]}, maximum over ranks.",
    ]
    if config["precision"]["param"] == "bf16":
        lines.append("The peer trains with losses in bf16; here they are computed from its logits again, in fp32.")
    if device == "cpu":
        lines.append("minillm runs on its simulated device: nothing about speed or memory on a GPU follows from this.")
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    single = next((r["single_process"] for r in results.values() if r and "single_process" in r), None)
    if single:
        lines.append(
            f"A single process without FSDP: loss 0 {single['loss']:.4f}, grad norm 0 {single['grad_norm']:.4g}"
        )
    return "\n".join(lines)


def as_json(config, arguments, device, results, problems):
    parts = {}
    for name, result in results.items():
        parts[name] = result and {**summary(config, arguments, result), **result}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "config": config,
        "world": arguments.world,
        "device": device,
        "steps": arguments.steps,
        "warmup": arguments.warmup,
        "memory_compared": memory_key(device),
        "parts": parts,
        "problems": problems,
    }
