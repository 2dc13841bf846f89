"""The nine programs of ``examples/standard_programs.py`` in PyTorch, for ``bench_programs.py``: returns steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[], float]


# program: step
def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], clip: float | None = None
) -> Step:
    def step() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return value.item()

    model.train()
    return step


# program: ResNet
def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(inputs, outputs, stride), nn.ReLU(), conv(outputs, outputs))
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(images: Any, labels: Any, width: int = 8) -> Step:
    sizes = [width, width, 2 * width, 4 * width]
    stages = [Block(sizes[k], sizes[k + 1], 1 if k == 0 else 2) for k in range(3)]
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(conv(3, width), nn.ReLU(), *stages, pool, nn.Linear(4 * width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return stepper(model, optimizer, lambda: F.cross_entropy(model(images), labels))


# program: U-Net
def double(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(conv(inputs, outputs), nn.ReLU(), conv(outputs, outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width * 2**k for k in range(depth + 1)]
        self.down = nn.ModuleList([double(i, o) for i, o in zip([3, *sizes], sizes, strict=False)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * n, n, 2, 2) for n in sizes[:-1]])
        self.join = nn.ModuleList([double(2 * n, n) for n in sizes[:-1]])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        skips = []
        for k, layer in enumerate(self.down):
            h = layer(F.max_pool2d(h, 2) if k else h)
            skips.append(h)
        for k in reversed(range(len(self.up))):
            h = self.join[k](torch.cat([skips[k], self.up[k](h)], dim=1))
        return torch.as_tensor(self.head(h))


def unet(images: Any, mask: Any, width: int = 4, depth: int = 2) -> Step:
    model = UNet(width, depth)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return stepper(model, optimizer, lambda: F.cross_entropy(model(images), mask))


# program: ViT
class ViT(nn.Module):
    def __init__(self, features: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, features, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, features))
        self.positions = nn.Parameter(torch.randn(1, 17, features) * 0.02)
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(features, heads, 4 * features, **options)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(features), nn.Linear(features, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1) + self.positions
        return torch.as_tensor(self.head(self.norm(self.encoder(h))[:, 0]))


def vit(images: Any, labels: Any, features: int = 16, layers: int = 2, heads: int = 2) -> Step:
    model = ViT(features, layers, heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return stepper(model, optimizer, lambda: F.cross_entropy(model(images), labels), clip=1.0)


# program: GPT
class Attention(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, cached: bool) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        is_prefix = self.cache is None
        if cached:
            if self.cache is not None:
                k, v = torch.cat([self.cache[0], k], 2), torch.cat([self.cache[1], v], 2)
            self.cache = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_prefix)
        return torch.as_tensor(self.out(y.transpose(1, 2).flatten(2)))


class GPTBlock(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(features), Attention(features, heads)
        mlp = [nn.LayerNorm(features), nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features)]
        self.mlp = nn.Sequential(*mlp)

    def forward(self, x: torch.Tensor, cached: bool) -> torch.Tensor:
        x = x + self.attention(self.norm(x), cached)
        return torch.as_tensor(x + self.mlp(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, features: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, features), nn.Embedding(length, features)
        self.blocks = nn.ModuleList([GPTBlock(features, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(features), nn.Linear(features, vocabulary)

    def forward(self, tokens: torch.Tensor, position: int = 0, cached: bool = False) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(position, position + tokens.shape[1]))
        for block in self.blocks:
            x = block(x, cached)
        return torch.as_tensor(self.head(self.norm(x)))

    @torch.no_grad()
    def write(self, prompt: torch.Tensor, count: int) -> torch.Tensor:
        text = new = prompt
        while text.shape[1] < prompt.shape[1] + count:
            new = self(new, text.shape[1] - new.shape[1], cached=True)[:, -1:].argmax(-1)
            text = torch.cat([text, new], dim=1)
        for block in self.blocks:
            block.attention.cache = None
        return text


def gpt(tokens: Any, following: Any, features: int = 16, layers: int = 2, heads: int = 2) -> Step:
    model = GPT(50, tokens.shape[1], features, layers, heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return stepper(model, optimizer, lambda: F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()), 1.0)


# program: LSTM
class Language(nn.Module):
    def __init__(self, vocabulary: int, features: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, features)
        self.lstm = nn.LSTM(features, features, 2, batch_first=True)
        self.head = nn.Linear(features, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.lstm(self.tokens(tokens))[0]))


def lstm(tokens: Any, following: Any, features: int = 16) -> Step:
    model = Language(50, features)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return stepper(model, optimizer, lambda: F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()), 1.0)


# program: VAE
class VAE(nn.Module):
    def __init__(self, hidden: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        noise = torch.randn_like(mean) if self.training else 0.0
        return self.decoder(mean + torch.exp(log_variance * 0.5) * noise), mean, log_variance


def vae(images: Any, hidden: int = 32, latent: int = 4) -> Step:
    model = VAE(hidden, latent)

    def loss() -> torch.Tensor:
        again, mean, log_variance = model(images)
        divergence = torch.exp(log_variance) + mean * mean - 1.0 - log_variance
        return F.binary_cross_entropy(again, images) * 64.0 + 0.5 * divergence.sum(-1).mean()

    return stepper(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss)


# program: GAN
def gan(noise: Any, real: Any, hidden: int = 16) -> Step:
    critic = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    generator = nn.Sequential(nn.Linear(noise.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 2))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)

    def step() -> float:
        critic_optimizer.zero_grad()
        fake = generator(noise).detach()
        critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
        critic_loss.backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss = F.softplus(-critic(generator(noise))).mean()
        generator_loss.backward()
        generator_optimizer.step()
        return critic_loss.item() + generator_loss.item()

    return step


# program: contrastive
def contrastive(one: Any, two: Any, width: int = 4) -> Step:
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(conv(3, width), nn.ReLU(), Block(width, 2 * width, 2), pool, nn.Linear(2 * width, 16))

    def loss() -> torch.Tensor:
        a, b = F.normalize(model(one), dim=-1), F.normalize(model(two), dim=-1)
        scores, labels = a @ b.T / 0.1, torch.arange(len(one))
        return 0.5 * (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels))

    return stepper(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss)


# program: LoRA
class LoRALinear(nn.Module):
    def __init__(self, inner: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, alpha / rank
        self.a = nn.Parameter(torch.empty(rank, inner.in_features))
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.inner(x) + F.linear(F.linear(x, self.a), self.b) * self.scale)


class Classifier(nn.Module):
    def __init__(self, features: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, features), nn.Embedding(12, features)
        layer = nn.TransformerEncoderLayer(features, heads, 4 * features, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(features, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.encoder(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return torch.as_tensor(self.head(h.mean(dim=1)))


def lora(tokens: Any, labels: Any, features: int = 16, layers: int = 2, heads: int = 2) -> Step:
    model = Classifier(features, layers, heads)
    for parameter in model.parameters():
        parameter.requires_grad = False
    for layer in model.encoder.layers:
        layer.linear1 = LoRALinear(layer.linear1, 4, 8)  # type: ignore[arg-type,assignment]
        layer.linear2 = LoRALinear(layer.linear2, 4, 8)  # type: ignore[arg-type,assignment]
    for parameter in model.head.parameters():
        parameter.requires_grad = True
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return stepper(model, optimizer, lambda: F.cross_entropy(model(tokens), labels))


# programs end
PROGRAMS = {
    "ResNet": resnet,
    "U-Net": unet,
    "ViT": vit,
    "GPT": gpt,
    "LSTM": lstm,
    "VAE": vae,
    "GAN": gan,
    "contrastive": contrastive,
    "LoRA": lora,
}
