"""Whether the programs did the same training: the first step, which all make from the same weights and tokens."""

# Relative. bf16 carries 8 bits: rounding moves a loss by parts in a thousand and a norm of gradients, of which each is
# rounded, not more; a gradient that is scaled by the world size is off by at least a factor of two.
TOLERANCES = {"bf16": {"loss": 0.01, "grad_norm": 0.05}, "fp32": {"loss": 1e-4, "grad_norm": 1e-3}}


def disagreement(what, name, value, expected_name, expected, tolerance):
    if value is None or expected is None:
        return [f"{name} did not report its {what} of the first step"]
    if abs(value - expected) <= tolerance * abs(expected):
        return []
    ratio = value / expected if expected else float("inf")
    return [f"the {what} of the first step is {value:.6g} in {name} and {expected:.6g} in {expected_name}: a factor of "
            f"{ratio:.4g}, allowed are {tolerance:.2g} relative. They do not train the same"]  # fmt: skip


def first_step(config, results):
    """Messages about disagreements. `results`: the parts' results by name, None for those that failed."""
    tolerances = TOLERANCES[config["precision"]["param"]]
    peers = {name: result for name, result in results.items() if result and name != "minillm"}
    single = next((r["single_process"] for r in peers.values() if "single_process" in r), None)
    messages = []
    for what, key in (("loss", "losses"), ("grad_norm", "grad_norms")):
        label = {"loss": "loss", "grad_norm": "gradient norm"}[what]
        for name, result in peers.items():
            if single:
                messages += disagreement(
                    label, name, result[key][0], "a single process without FSDP", single[what], tolerances[what]
                )
        if peers and results["minillm"]:
            name, result = next(iter(peers.items()))
            own = results["minillm"][key][0]
            messages += disagreement(label, "minillm", own, name, result[key][0], tolerances[what])
    return messages
