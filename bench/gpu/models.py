"""Two real models of well-known size, trained in bf16 by autocast as they usually are, with parameters in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases import Batch, Case, Gpt

_BATCHES = 3  # made before, so that no step waits for its data


class Gpt2(Gpt):
    """GPT-2 (small): the shapes of `bench.cases.gpt2_shapes`, linear weights the other way round."""

    VOCABULARY = 50257

    def __init__(self) -> None:
        super().__init__(layers=12, width=768, heads=12, context=1024)


def _convolution_and_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """Three convolutions around which the input takes a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce = _convolution_and_norm(inputs, width, 1)
        self.convolve = _convolution_and_norm(width, width, 3, stride)
        self.expand = _convolution_and_norm(width, outputs, 1)
        self.shortcut = nn.Identity() if inputs == outputs else _convolution_and_norm(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        """From (batch, inputs, height, width) to (batch, 4 * width, height / stride, width / stride)."""
        hidden = F.relu(self.reduce(images), inplace=True)
        hidden = F.relu(self.convolve(hidden), inplace=True)
        return F.relu(self.expand(hidden) + self.shortcut(images), inplace=True)


class ResNet50(nn.Module):
    """ResNet-50: the parameters of `bench.cases.resnet50_shapes`, in that order."""

    CLASSES = 1000

    def __init__(self) -> None:
        super().__init__()
        self.stem = _convolution_and_norm(3, 64, 7, stride=2)
        blocks: list[nn.Module] = []
        channels = 64
        for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(channels, self.CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of classifying images, (batch, 3, height, width)."""
        hidden = F.relu(self.stem(images), inplace=True)
        hidden = F.max_pool2d(hidden, kernel_size=3, stride=2, padding=1)
        logits = self.classify(self.blocks(hidden).mean((2, 3)))
        return F.cross_entropy(logits, labels)


class Autocast(nn.Module):
    """A module that computes in bf16 where that is safe."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Tensor) -> Tensor:
        """As the module's."""
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            return self.module(*batch)


def _case(
    name: str, about: str, model: Callable[[], nn.Module], batch: Callable[[torch.device], Batch], channels_last: bool
) -> Case:
    def build(device: torch.device) -> tuple[nn.Module, Callable[[int, int], Batch]]:
        torch.manual_seed(0)
        module: nn.Module = model().to(device)
        if channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batches = [batch(device) for _ in range(_BATCHES)]
        return module, lambda rank, step: batches[step % _BATCHES]

    return Case(name, about, build)


# By the name of the case: what becomes of a model whose parameters are in fp32.
_GPT2 = {
    "gpt2": ("bf16 autocast", Autocast),
    "gpt2-bf16": ("parameters in bf16", lambda module: module.bfloat16()),
    "gpt2-fp32": ("fp32, products in tf32", lambda module: module),
}


def gpt2(samples: int, length: int, name: str = "gpt2") -> Case:
    """GPT-2 with a batch of so many samples of so many tokens."""
    in_words, cast = _GPT2[name]

    def batch(device: torch.device) -> Batch:
        return (torch.randint(Gpt2.VOCABULARY, (samples, length + 1), device=device),)

    about = f"GPT-2 small, {samples} x {length} tokens, {in_words}"
    return _case(name, about, lambda: cast(Gpt2()), batch, channels_last=False)


def _tiny() -> Case:
    """A GPT of one layer, for a device on which each operator takes long."""

    def batch(device: torch.device) -> Batch:
        return (torch.randint(Gpt.VOCABULARY, (1, 9)).to(device),)

    about = "a GPT of one layer, 1 x 8 tokens, fp32"
    return _case("tiny", about, lambda: Gpt(layers=1, width=32, heads=2, context=8), batch, channels_last=False)


def resnet50(samples: int, size: int) -> Case:
    """ResNet-50 with a batch of so many square images, channels last."""

    def batch(device: torch.device) -> Batch:
        images = torch.randn(samples, 3, size, size, device=device).to(memory_format=torch.channels_last)
        return images, torch.randint(ResNet50.CLASSES, (samples,), device=device)

    about = f"ResNet-50, {samples} images of {size} x {size}, bf16 autocast, channels last"
    return _case("resnet50", about, lambda: Autocast(ResNet50()), batch, channels_last=True)


def cases(quick: bool) -> tuple[Case, ...]:
    """The models of training steps, in the order in which they are measured."""
    if quick:
        return (_tiny(),)
    gpts = (gpt2(samples=8, length=1024, name=name) for name in _GPT2)
    return (*gpts, resnet50(samples=64, size=224))


class LlamaBlock(nn.Module):
    """Attention whose queries share keys and values, and a gated MLP; no biases."""

    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.sizes = (heads, width // heads)
        of_keys = shared * width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, of_keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """From and to (batch, length, width)."""
        (heads, size), (before, between) = self.sizes, self.norms
        normed = before(hidden)
        parts = (part(normed).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.query, self.key, self.value))
        query, key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        normed = between(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Of the size of Llama 3.2's 1B, with a tied embedding and without positions: 1.24 G parameters.

    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in Llama().parameters())
    1235814400
    """

    def __init__(
        self,
        layers: int = 16,
        width: int = 2048,
        heads: tuple[int, int] = (32, 8),
        inner: int = 8192,
        vocabulary: int = 128256,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(LlamaBlock(width, *heads, inner) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each next token of (batch, length + 1)."""
        hidden = self.norm(self.blocks(self.tokens(tokens[:, :-1])))
        return F.cross_entropy(F.linear(hidden, self.tokens.weight).flatten(0, 1), tokens[:, 1:].flatten())


def llama(samples: int, length: int, quick: bool = False) -> Case:
    """In bf16, with a batch of so many samples of so many tokens; quick: a tiny one."""
    sizes: tuple[Any, ...] = (1, 32, (4, 2), 64, 64) if quick else ()

    def batch(device: torch.device) -> Batch:
        vocabulary = 64 if quick else 128256
        return (torch.randint(vocabulary, (samples, length + 1)).to(device),)

    def model() -> nn.Module:
        return Llama(*sizes).bfloat16()

    return _case("llama", f"a Llama of 1.2 G, {samples} x {length} tokens, bf16", model, batch, channels_last=False)
