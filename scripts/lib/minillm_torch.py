"""The reference MiniLLM in PyTorch: what minillm is compared with, in results (make_golden.py) and in speed
(compare_pytorch.py). Parameters have the names and the order of minillm's parameter table."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100  # F.cross_entropy's default ignore_index


@dataclass(frozen=True)
class Model:
    """The keys of the `model` object of a configuration file."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    ffn_dim: int
    causal: bool = False
    rope_theta: float = 0.0
    final_norm: bool = False
    norm_eps: float = 1.1920928955078125e-07


def rotate(x, theta):
    """Rotary position encoding of x [B, H, T, D]: element i is paired with element i + D/2. Angles in float64, the
    rotation in fp32 or better, rounded once."""
    T, D = x.shape[-2:]
    frequency = theta ** (-torch.arange(0, D, 2, dtype=torch.float64, device=x.device) / D)
    angle = torch.arange(T, dtype=torch.float64, device=x.device)[:, None] * frequency
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.in_proj_weight = nn.Parameter(torch.empty(3 * model.dim, model.dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * model.dim))
        self.out_proj = nn.Linear(model.dim, model.dim)

    def forward(self, x):
        B, T, C = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (part.view(B, T, self.model.n_heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        if self.model.rope_theta:
            q, k = rotate(q, self.model.rope_theta), rotate(k, self.model.rope_theta)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.model.causal)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, C))


class FeedForward(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.up = nn.Linear(model.dim, model.ffn_dim, bias=False)
        self.down = nn.Linear(model.ffn_dim, model.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.norm1 = nn.RMSNorm(model.dim, model.norm_eps)
        self.attn = Attention(model)
        self.norm2 = nn.RMSNorm(model.dim, model.norm_eps)
        self.ffn = FeedForward(model)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class MiniLLM(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.embedding = nn.Embedding(model.vocab_size, model.dim)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.n_layers))
        if model.final_norm:
            self.final_norm = nn.RMSNorm(model.dim, model.norm_eps)
        self.head = nn.Linear(model.dim, model.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        if hasattr(self, "final_norm"):
            x = self.final_norm(x)
        return self.head(x)


def empty_model(model):
    """A MiniLLM whose parameters have shapes but no memory yet."""
    with torch.device("meta"):
        return MiniLLM(model)


def initialize_(module, generator):
    """PyTorch's default distributions, drawn in the order of the parameters."""

    def uniform(weight, bound):
        weight.uniform_(-bound, bound, generator=generator)

    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name == "embedding.weight":
                weight.normal_(generator=generator)
            elif "norm" in name:
                weight.fill_(1)
            elif name.endswith("bias"):
                weight.zero_()
            elif name.endswith("in_proj_weight"):  # Xavier
                uniform(weight, math.sqrt(6 / sum(weight.shape)))
            else:
                uniform(weight, 1 / math.sqrt(weight.shape[1]))
