"""Chapter 11: gradients that vanish in float16, updates that vanish in bfloat16 weights, and bytes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .chapter import Chapter, Words
from .digits import load

POWERS = range(0, 33, 4)
"""The loss is scaled by two to the power of these."""
BATCH = 256
EPOCHS = 15
RATE = 0.05


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return three convolutions and a linear layer whose weights are the same on every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    ).to(dtype)


def autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the context in which products have this dtype; float32 switches it off."""
    is_on = dtype != torch.float32
    return torch.autocast("cpu", dtype=dtype if is_on else torch.bfloat16, enabled=is_on)


def train(model: nn.Module, products: torch.dtype, weights: torch.dtype = torch.float32) -> float:
    """Train by SGD with momentum. Return the mean loss of the last epoch."""
    x, y = load("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(EPOCHS):
        total = 0.0
        for part in torch.randperm(len(x), generator=generator).split(64):
            with autocast(products):
                loss = nn.functional.cross_entropy(model(x[part].to(weights)), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(part)
    return total / len(x)


def gradients(model: nn.Sequential, dtype: torch.dtype, scale: float = 1.0) -> dict[str, Tensor]:
    """Return the gradients of the weights and of the layers' outputs, still scaled, in float32."""
    x, y = (part[:BATCH] for part in load("train"))
    outputs = []
    model.zero_grad()
    with autocast(dtype):
        for layer in model:
            x = layer(x)
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                x.retain_grad()
                outputs.append(x)
        loss = nn.functional.cross_entropy(x, y)
    (loss * scale).backward()
    tensors = {"weights": list(model.parameters()), "activations": outputs}
    return {
        name: torch.cat([tensor.grad.flatten().float() for tensor in group if tensor.grad is not None])
        for name, group in tensors.items()
    }


def vanished(values: Tensor, reference: Tensor) -> float:
    """Return the share of the non-zero reference values that are zero here."""
    return float((values[reference != 0] == 0).float().mean())


def underflow(model: nn.Sequential) -> dict[str, Any]:
    """Return the shares of gradients that float16 loses, by the scale of the loss, and the gradient's error."""
    exact = gradients(model, torch.float32)

    def error(values: Tensor) -> float:
        return float((values - exact["weights"]).norm() / exact["weights"].norm())

    rows = {}
    for power in POWERS:
        scaled = gradients(model, torch.float16, 2.0**power)
        rows[f"2^{power}"] = {
            **{name: vanished(values, exact[name]) for name, values in scaled.items()},
            "overflow": float((~scaled["weights"].isfinite()).float().mean()),
            "error": error(scaled["weights"] / 2.0**power) if scaled["weights"].isfinite().all() else None,
        }
    half = gradients(model, torch.bfloat16)
    return {
        "float16 by scale": rows,
        "bfloat16": {
            **{name: vanished(values, exact[name]) for name, values in half.items()},
            "error": error(half["weights"]),
        },
    }


def lost_updates(model: nn.Sequential) -> dict[str, float]:
    """Return the share of weights, by their dtype, that one step of SGD leaves as they are."""
    step = RATE * gradients(model, torch.float32)["weights"]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])[step != 0]
    return {
        str(dtype).removeprefix("torch."): float(
            ((weights.to(dtype).float() - step[step != 0]).to(dtype) == weights.to(dtype)).float().mean()
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }


def saved_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of activations that a forward pass keeps for the backward pass."""
    x, y = (part[:BATCH] for part in load("train"))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() and len(tensor) == BATCH and tensor.untyped_storage().data_ptr() not in parameters:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(dtype):
        loss = nn.functional.cross_entropy(model(x), y)
    assert loss.grad_fn is not None  # the graph, and all that it keeps, live until here
    return sum(sizes.values())


def measure() -> dict[str, Any]:
    """Return shares of lost gradients and updates, losses by the dtype of weights and products, and bytes."""
    torch.set_num_threads(1)  # the layers are small
    model = network()
    losses = {
        "float32": train(model, torch.float32),
        "bfloat16 products": train(network(), torch.bfloat16),
        "bfloat16 weights": train(network(torch.bfloat16), torch.float32, torch.bfloat16),
    }
    return {
        **underflow(model),
        "unchanged weights": lost_updates(model),
        "loss": losses,
        "activations, bytes": {
            str(dtype).removeprefix("torch."): saved_bytes(model, dtype) for dtype in (torch.float32, torch.bfloat16)
        },
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the shares of gradients that vanish and overflow, by the scale of the loss."""
    axes = figure.subplots()
    rows = numbers["float16 by scale"]
    styles = {"activations": ("#c0392b", "o-"), "weights": ("#2c3e50", "s-"), "overflow": ("#7f8c8d", "^--")}
    names = {
        "activations": "zero: gradients of activations",
        "weights": "zero: gradients of weights",
        "overflow": "inf or NaN: gradients of weights",
    }
    for name, (colour, style) in styles.items():
        axes.plot(POWERS, [100 * row[name] for row in rows.values()], style, color=colour, label=words(names[name]))
    axes.set_xticks(POWERS, [f"$2^{{{power}}}$" for power in POWERS])
    axes.set_xlabel(words("scale of the loss"))
    axes.set_ylabel(words("share of gradients, %"))
    axes.set_title(words("float16: what vanishes, and what overflows"))
    axes.legend(loc=(0.43, 0.62))


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the smallest power of two by which a loss is scaled so that a gradient of 1e-9 survives in float16."""
    fitting = next(2**power for power in range(60) if torch.tensor(1e-9 * 2**power).half().item() != 0)
    return abs(float(answer) - float(fitting)) < 1e-9


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "zero: gradients of activations": "变成零：激活值的梯度",
        "zero: gradients of weights": "变成零：权重的梯度",
        "inf or NaN: gradients of weights": "inf 或 NaN：权重的梯度",
        "scale of the loss": "损失的缩放倍数",
        "share of gradients, %": "占全部梯度的比例（%）",
        "float16: what vanishes, and what overflows": "float16：哪些梯度下溢，哪些上溢",
    },
)
