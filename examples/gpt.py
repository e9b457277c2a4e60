"""A small GPT that reads and writes bytes."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class Shape:
    """The size of a model; ``context`` is the number of bytes that it sees at once."""

    layers: int = 4
    heads: int = 4
    width: int = 192
    context: int = 64


def turns(length: int, width: int, device: torch.device) -> Tensor:
    """How far each position (row) turns each pair of numbers (column), as complex numbers on the unit circle."""
    speeds = 100.0 ** -torch.linspace(0, 1, width // 2, device=device)
    angles = torch.arange(length, device=device)[:, None] * speeds
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, by: Tensor) -> Tensor:
    """Turn queries or keys (..., length, width) by their position, so that attention sees distances (RoPE)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * by).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Attend from each position of ``x`` (batch, length, width) to itself and to those before it."""
        batch, length, width = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        query, key = rotate(qkv[:2], turn)
        attended = F.scaled_dot_product_attention(query, key, qkv[2], is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each normed before and added to what it read (pre-norm)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class GPT(nn.Module):
    """A decoder-only transformer whose last layer shares its weight with the first, so DDP meets a shared parameter."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # What each block adds to the residual stream starts small, so that the stream does not grow with depth.
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.shape.layers))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, length, 256) for the byte after each position, or with ``targets`` the mean loss in nats."""
        x = self.token(tokens)
        turn = turns(tokens.shape[1], self.shape.width // self.shape.heads, tokens.device)
        for block in self.blocks:
            x = block(x, turn)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: str, length: int, temperature: float = 0.7) -> str:
        """Continue ``prompt`` by ``length`` bytes, the same each time for the same parameters."""
        device = self.token.weight.device
        chance = torch.Generator().manual_seed(0)
        tokens = torch.tensor([list(prompt.encode())], device=device)
        for _ in range(length):
            logits = self(tokens[:, -self.shape.context :])[0, -1]
            odds = (logits.float() / temperature).softmax(dim=-1).cpu()
            tokens = torch.cat((tokens, torch.multinomial(odds, 1, generator=chance).view(1, 1).to(device)), dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")
