"""Chapter 16: rounded gradients, gradients of low rank, and weights exchanged every few steps."""

# No postponed annotations here: DDP reads those of its hook.
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from .chapter import Chapter, Words, on_ranks
from .digits import load

BATCH, EPOCHS, RATE = 64, 30, 0.02
RANK = 1
"""Of the matrices of PowerSGD."""
EVERY = 22
"""Inner steps of local SGD and DiLoCo: an epoch."""
OUTER = {"local SGD": (1.0, 0.0), "DiLoCo": (0.7, 0.9), "DiLoCo, outer rate 0.1": (0.1, 0.9)}
"""Learning rate and momentum of the outer step. The last multiplies a lasting movement by 0.1 / (1 - 0.9) = 1."""
WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RANKS = (2, 8, 64)


def network() -> nn.Sequential:
    """Return a perceptron whose weights are the same on every call."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def difference(tensor: Tensor, reference: Tensor) -> float:
    """Return the relative difference of two vectors."""
    return float((tensor.double() - reference.double()).norm() / reference.double().norm())


def rounding() -> dict[str, Any]:
    """Return the relative error of a sum of gradients, by type, number of ranks, and type of the sum."""
    results: dict[str, Any] = {}
    images, classes = load("train")
    for ranks in RANKS:
        gradients = []
        for x, y in zip(images[:1280].flatten(1).chunk(ranks), classes[:1280].chunk(ranks), strict=True):
            model = network()
            nn.functional.cross_entropy(model(x), y).backward()
            gradients.append(flat([p.grad for p in model.parameters() if p.grad is not None]) / ranks)
        exact = torch.stack(gradients).double().sum(0)
        for name, wire in WIRES.items():
            sent = [gradient.to(wire) for gradient in gradients]
            in_turn = sent[0].clone()
            for gradient in sent[1:]:
                in_turn += gradient
            at_once = torch.stack(sent).float().sum(0).to(wire)
            lost = (sent[0] == 0) & (gradients[0] != 0)
            results[f"{name}, {ranks} ranks"] = {
                "summed in 16 bits": difference(in_turn, exact),
                "summed in float32": difference(at_once, exact),
                "vanished": float(lost.sum() / (gradients[0] != 0).sum()),
            }
    return results


def message_bytes(model: nn.Module, exchange: str) -> float:
    """Return the bytes that a rank of many sends per step for a sum: those of each message, once."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if exchange in WIRES:
        return 2 * numbers
    if exchange in OUTER:
        return 4 * numbers / EVERY
    if exchange.startswith("PowerSGD"):
        shapes = [parameter.shape for parameter in model.parameters()]
        low = [RANK * sum(shape) if len(shape) == 2 else shape.numel() for shape in shapes]
        return 4 * sum(low)
    return 4 * numbers


def hooked(model: nn.Module, exchange: str) -> DistributedDataParallel:
    """Return the model in DDP, with the hook of an exchange."""
    parallel = DistributedDataParallel(model)
    if exchange.startswith("PowerSGD"):
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=RANK,
            start_powerSGD_iter=2,  # torch's least
            min_compression_rate=1.0,
            use_error_feedback="forgotten" not in exchange,
        )
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif exchange in WIRES:
        wire = WIRES[exchange]

        def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            sent = (bucket.buffer() / dist.get_world_size()).to(wire)
            work = dist.all_reduce(sent, async_op=True).get_future()
            return work.then(lambda future: bucket.buffer().copy_(future.value()[0]))

        parallel.register_comm_hook(None, hook)
    return parallel


def train(exchange: str) -> dict[str, Any]:
    """Train on two ranks; for "one process", on the whole batches (*collective*)."""
    inner, is_alone = network(), exchange == "one process"
    model: nn.Module = inner if is_alone or exchange in OUTER else hooked(inner, exchange)
    optimizer = torch.optim.SGD(inner.parameters(), lr=RATE, momentum=0.9)
    images, classes = load("train")
    images = images.flatten(1)
    tested, answers = load("test")
    generator = torch.Generator().manual_seed(1)
    anchors = [parameter.detach().clone() for parameter in inner.parameters()]
    velocities = [torch.zeros_like(anchor) for anchor in anchors]
    losses, drift, weights = [], 0.0, []
    step = 0
    for _ in range(EPOCHS):
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: BATCH * EVERY].split(BATCH):
            own = batch if is_alone else batch.chunk(2)[dist.get_rank()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[own]), classes[own]).backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0 and exchange in OUTER:
                if drift == 0:
                    drift = _distance(inner)
                outer_step(inner, anchors, velocities, *OUTER[exchange])
        weights.append(flat([*inner.parameters()]))
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(inner(images), classes)))
            accuracy = float((inner(tested.flatten(1)).argmax(1) == answers).double().mean())
    results = {"losses": losses, "accuracy": accuracy, "weights": weights}
    return results | ({"ranks apart before the first exchange": drift} if drift else {})


@torch.no_grad()
def outer_step(model: nn.Module, anchors: list[Tensor], velocities: list[Tensor], rate: float, momentum: float) -> None:
    """Step from the anchors by the mean movement of the ranks, with Nesterov momentum (*collective*)."""
    for parameter, anchor, velocity in zip(model.parameters(), anchors, velocities, strict=True):
        gradient = anchor - parameter
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        velocity.mul_(momentum).add_(gradient)
        parameter.copy_(anchor - rate * (gradient + momentum * velocity))
        anchor.copy_(parameter)


def _distance(model: nn.Module) -> float:
    own = flat([*model.parameters()])
    dist.all_reduce(total := own.clone())
    return float((own - total / 2).norm() / (total / 2).norm())


EXCHANGES = ("float32", *WIRES, "PowerSGD", "PowerSGD, error forgotten", *OUTER)


def trained() -> dict[str, Any]:
    """Return the losses by exchange, and the difference of the weights from one process (*collective*)."""
    torch.set_num_threads(1)
    alone = train("one process")
    results = {}
    for exchange in EXCHANGES:
        result = train(exchange)
        pairs = zip(result.pop("weights"), alone["weights"], strict=True)
        differences = [difference(*pair) for pair in pairs]
        results[exchange] = {
            "bytes per step": message_bytes(network(), exchange),
            "weights, after the first epoch": differences[0],
            "weights, at the end": differences[-1],
            **result,
        }
    return results


def measure() -> dict[str, Any]:
    """Return errors of sums by type and ranks, and losses, bytes and differences by exchange."""
    return {
        "sums": rounding(),
        "parameters": sum(parameter.numel() for parameter in network().parameters()),
        "exchanges": on_ranks(trained, 2)[0],
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the loss by the bytes that were sent, and by the epoch."""
    left, right = figure.subplots(1, 2, sharey=True)
    styles = {
        "float32": ("#2c3e50", "-"),
        "bf16": ("#2471a3", "--"),
        "PowerSGD": ("#1e8449", "-"),
        "PowerSGD, error forgotten": ("#c0392b", "--"),
        "local SGD": ("#b7950b", "-"),
        "DiLoCo": ("#7d3c98", "-"),
    }
    for exchange, (colour, style) in styles.items():
        result = numbers["exchanges"][exchange]
        epochs = range(1, len(result["losses"]) + 1)
        sent = [epoch * EVERY * result["bytes per step"] / 1e6 for epoch in epochs]
        left.loglog(sent, result["losses"], style, color=colour)
        right.semilogy([*epochs], result["losses"], style, color=colour, label=words(exchange))
    left.set_xlabel(words("sent in messages, MB"))
    left.set_ylabel(words("training loss"))
    right.set_xlabel(words("epoch"))
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check how many times fewer numbers PowerSGD of rank 4 sends for a matrix (1024, 4096)."""
    return math.isclose(float(answer), 1024 * 4096 / (4 * (1024 + 4096)), rel_tol=0.01)


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "float32": "float32",
        "bf16": "bf16",
        "PowerSGD": "PowerSGD",
        "PowerSGD, error forgotten": "PowerSGD，丢掉误差",
        "local SGD": "local SGD",
        "DiLoCo": "DiLoCo",
        "sent in messages, MB": "消息的总大小（MB）",
        "training loss": "训练损失",
        "epoch": "epoch",
    },
)
