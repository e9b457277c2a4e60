"""The models that `bench.step` trains: four lists of parameter shapes, and small but real GPTs.

In a shape-only model all that costs time is memory: forward reads each parameter once, backward writes each gradient
once. What a DDP adds then shows undiluted, with the gradients' true sizes and order of arrival.

A case has a batch of its own; `resnet50@8` is the one with eight times that batch. In a shape-only model each parameter
is then used eight times in a row: forward and backward take about eight times as long, and as many bytes travel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model whose forward returns the loss, and its inputs: other ones on each rank and in each step."""

    name: str
    about: str
    build: Callable[[torch.device], tuple[nn.Module, Callable[[int, int], Batch]]]
    by_default: bool = True  # measured where no case is named


class ShapesModel(nn.Module):
    """A chain of dot products, one for each use of a parameter: gradients come in the reverse order of the uses."""

    # Slices start at multiples of 64 bytes, as gradients that a real model allocates do.
    _SLICE_STEP = 16

    def __init__(self, shapes: Sequence[Shape], uses: Sequence[int], device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(device)) for shape in shapes
        )
        self.uses = tuple(uses)

    def noise_numel(self) -> int:
        """How much noise `forward` needs."""
        return max(weight.numel() for weight in self.weights) + self._SLICE_STEP * len(self.uses)

    def forward(self, scale: Tensor, noise: Tensor) -> Tensor:
        """The sum of the dot products of each used parameter and a slice of the noise, times scale.

        Each use has another slice, so that every parameter's gradient (scale * slice) differs from every other's: two
        that were exchanged would be seen.
        """
        total = torch.zeros_like(scale)
        for place, index in enumerate(self.uses):
            flat = self.weights[index].view(-1)
            start = place * self._SLICE_STEP
            total = total + torch.dot(flat, noise[start : start + flat.numel()])
        return scale * total


def _shapes_case(
    name: str,
    about: str,
    shapes: Callable[[], Sequence[Shape]],
    reused: Sequence[int] = (),
    by_default: bool = True,
    factor: int = 1,
) -> Case:
    def build(device: torch.device) -> tuple[nn.Module, Callable[[int, int], Batch]]:
        listed = shapes()
        uses = [index for index in (*range(len(listed)), *reused) for _ in range(factor)]
        model = ShapesModel(listed, uses, device)
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(model.noise_numel(), generator=generator).to(device)

        def batch(rank: int, step: int) -> Batch:
            # Not a power of two apart: a gradient of the wrong rank, step or divisor has other bits.
            return torch.tensor(0.7 + 0.3 * rank + 0.011 * (step % 101), device=device), noise

        return model, batch

    return Case(name, about, build, by_default)


def resnet50_shapes() -> list[Shape]:
    """The 161 parameters of ResNet-50, in the order in which its modules register them.

    >>> len(resnet50_shapes()), sum(torch.Size(shape).numel() for shape in resnet50_shapes())
    (161, 25557032)
    """
    from bench.gpu.models import ResNet50

    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in ResNet50().parameters()]


def gpt2_shapes() -> list[Shape]:
    """The 148 parameters of GPT-2 (small); the first, the token embedding, is the output projection too.

    >>> len(gpt2_shapes()), sum(torch.Size(shape).numel() for shape in gpt2_shapes())
    (148, 124439808)
    """
    embedding: list[Shape] = [(50257, 768), (1024, 768)]
    return [*embedding, *_transformer_shapes(768, is_transposed=False), (768,), (768,)]


def _transformer_shapes(width: int, is_transposed: bool) -> list[Shape]:
    """Twelve blocks."""
    norm: list[Shape] = [(width,), (width,)]

    def linear(inputs: int, outputs: int) -> list[Shape]:
        return [(outputs, inputs) if is_transposed else (inputs, outputs), (outputs,)]

    attention = linear(width, 3 * width) + linear(width, width)
    mlp = linear(width, 4 * width) + linear(4 * width, width)
    return 12 * (norm + attention + norm + mlp)


def vit_tiny_shapes() -> list[Shape]:
    """The 152 parameters of ViT-Tiny with patches of 16.

    >>> len(vit_tiny_shapes()), sum(torch.Size(shape).numel() for shape in vit_tiny_shapes())
    (152, 5717416)
    """
    embedding: list[Shape] = [(1, 1, 192), (1, 197, 192), (192, 3, 16, 16), (192,)]
    blocks = _transformer_shapes(192, is_transposed=True)
    return [*embedding, *blocks, (192,), (192,), (1000, 192), (1000,)]


class Block(nn.Module):
    """Pre-norm causal attention and an MLP, each around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """From and to (batch, length, width)."""
        batch, length, width = hidden.shape
        split = self.query_key_value(self.norm_attention(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(self.norm_mlp(hidden))


class Gpt(nn.Module):
    """A byte-level GPT with a tied embedding."""

    VOCABULARY = 256

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each next byte of tokens, (batch, context + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(inputs.shape[1], device=tokens.device)
        hidden = self.norm(self.blocks(self.tokens(inputs) + self.positions(places)))
        logits = F.linear(hidden, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _gpt_case(name: str, layers: int, width: int, samples: int, by_default: bool = True) -> Case:
    context = 128

    def build(device: torch.device) -> tuple[nn.Module, Callable[[int, int], Batch]]:
        torch.manual_seed(0)
        model = Gpt(layers, width, 8, context).to(device)

        def batch(rank: int, step: int) -> Batch:
            generator = torch.Generator().manual_seed(1_000_003 * rank + step)
            tokens = torch.randint(Gpt.VOCABULARY, (samples, context + 1), generator=generator)
            return (tokens.to(device),)

        return model, batch

    about = f"real GPT, {layers} layers, width {width}, {samples} x {context} tokens a rank"
    return Case(name, about, build, by_default)


def _cases(factor: int) -> tuple[Case, ...]:
    """All of them, with so many times their batch."""
    return (
        _shapes_case("500x32sq", "500 parameters of 32 x 32, shapes only", lambda: [(32, 32)] * 500, factor=factor),
        _shapes_case("resnet50", "ResNet-50, 25.6 M parameters, shapes only", resnet50_shapes, factor=factor),
        # The tied embedding (parameter 0) is used first and last: its gradient is complete only at the end of backward.
        _shapes_case("gpt2", "GPT-2, 124 M parameters, shapes only", gpt2_shapes, reused=[0], factor=factor),
        _gpt_case("gpt", 6, 256, 4 * factor),
        # For slow networks and many ranks.
        _shapes_case("vit-tiny", "ViT-Tiny, 5.7 M parameters, shapes only", vit_tiny_shapes, (), False, factor),
        # For torch.compile: 16 M parameters, and little to compile.
        _gpt_case("gpt-16m", 9, 384, factor, by_default=False),
        _gpt_case("gpt-tiny", 1, 256, factor, by_default=False),
    )


CASES = _cases(1)
_WITH_FACTOR = re.compile(r"(.+)@([1-9]\d{0,3})")


def case_named(name: str) -> Case:
    """One of CASES, or with `@N` the same with N times its batch. Raises ValueError where there is none of that name.

    >>> case_named("gpt@2").name, case_named("gpt@2").about
    ('gpt@2', 'real GPT, 6 layers, width 256, 8 x 128 tokens a rank')
    >>> case_named("resnet50@8").about
    'ResNet-50, 25.6 M parameters, shapes only, 8 uses of each'
    """
    match = _WITH_FACTOR.fullmatch(name)
    stem, factor = (match[1], int(match[2])) if match else (name, 1)
    found = {case.name: case for case in _cases(factor)}.get(stem)
    if found is None:
        raise ValueError(f"there is no case {name!r}; there are {', '.join(case.name for case in CASES)}, and those @N")
    if factor == 1:
        return found
    uses = f", {factor} uses of each" if "shapes only" in found.about else ""
    return replace(found, name=name, about=f"{found.about}{uses}")
