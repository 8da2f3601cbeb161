"""Chapter 15: what a rank holds, what it sends, and four faults of a loop around `fully_shard`."""

# No postponed annotations here: DDP reads those of its hook.
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from .chapter import Chapter, Words, on_ranks
from .one_model import digits

BATCH, STEPS = 64, 60
SHARES = (48, 16)
"""Samples of the two ranks."""
RATE, NORM = 0.1, 0.5
FAULTS = ("none", "mean of means", "norm of the shard", "optimizer made before")


class Block(nn.Module):
    """A layer of the network, whose weights are gathered together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.seen: Tensor | None = None
        """The weights of the last forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, 64)."""
        self.seen = self.linear.weight.detach().clone()
        return x + torch.tanh(self.linear(x))


class Network(nn.Module):
    """Four blocks and a classifier; `number` runs one of the blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, number: int | None = None) -> Tensor:
        """Return logits (batch, 10)."""
        for block in self.blocks if number is None else [self.blocks[number]]:
            x = block(x)
        output: Tensor = self.head(x)
        return output


def block(model: Network, number: int) -> Block:
    """Return a block, typed as one."""
    return cast(Block, model.blocks[number])


class Counted:
    """A collective of `fully_shard`, as torch's own, that counts the numbers of its whole tensors."""

    def __init__(self, send: Any, counts: list[int], *, is_gather: bool) -> None:
        self._send, self._counts, self._is_gather = send, counts, is_gather

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        """Start the collective."""
        self._counts.append((output_tensor if self._is_gather else input_tensor).numel())
        return self._send(output_tensor, input_tensor, **options)


def network(dtype: torch.dtype = torch.float64) -> Network:
    """Return a network whose weights are the same on every call."""
    torch.manual_seed(0)
    return Network().to(dtype)


def shard(model: Network, mesh: Any = None, *, sums: bool = True) -> Network:
    """Shard a network block by block; gradients are sums over the ranks, or torch's means (*collective*)."""
    for module in (*model.blocks, model):
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        if sums:
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
    return model


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one vector; of shards, all of them (*collective*)."""
    return torch.cat([(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().flatten() for t in tensors])


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def difference(tensor: Tensor, reference: Tensor) -> float:
    """Return the relative difference of two vectors."""
    return float((tensor - reference).norm() / reference.norm())


def holdings() -> dict[str, Any]:
    """Return the numbers that this rank holds and that its messages have, per parameter (*collective*)."""
    results: dict[str, Any] = {}
    images, classes = digits()
    for name in ("ddp", "zero1", "fsdp"):
        model: nn.Module = network(torch.float32)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        reduced: list[int] = []
        gathered: list[int] = []
        if name == "fsdp":
            shard(model)  # type: ignore[arg-type]
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    gather = Counted(dist.all_gather_into_tensor, gathered, is_gather=True)
                    reduce = Counted(dist.reduce_scatter_tensor, reduced, is_gather=False)
                    module.set_custom_all_gather(cast(Any, gather))
                    module.set_custom_reduce_scatter(cast(Any, reduce))
        else:
            model = DistributedDataParallel(model)

            def hook(counts: list[int], bucket: GradBucket) -> torch.futures.Future[Tensor]:
                counts.append(bucket.buffer().numel())
                work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
                return work.then(lambda future: future.value()[0] / dist.get_world_size())

            model.register_comm_hook(reduced, hook)
        if name == "zero1":
            divided = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
            optimizer: Any = divided
        else:
            optimizer = torch.optim.AdamW(model.parameters())
        nn.functional.cross_entropy(model(images[:32].float()), classes[:32]).backward()
        optimizer.step()
        state = (divided.optim if name == "zero1" else optimizer).state
        entries = [value for values in state.values() for value in values.values() if value.dim()]
        results[name] = {
            "weights": sum(local(parameter).numel() for parameter in model.parameters()) / parameters,
            "gradients": sum(local(gradient).numel() for gradient in gradients(model)) / parameters,
            "optimizer state": sum(local(entry).numel() for entry in entries) / parameters,
        }
        if name != "zero1":  # whose optimizer broadcasts the weights itself
            results[name] |= {
                "all-gather": sum(gathered) / parameters,
                "largest block": max(gathered, default=0) / parameters,
            }
            results[name] |= {"reduce-scatter or all-reduce": sum(reduced) / parameters}
    return results


def train(fault: str | None) -> dict[str, Any]:
    """Train with clipped gradients: sharded with a fault, or, for None, in one process (*collective*)."""
    model, is_alone, rank = network(), fault is None, dist.get_rank()
    made_before = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    if not is_alone:
        shard(model, sums=fault != "mean of means")
    made_after = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    optimizer = made_before if fault == "optimizer made before" else made_after
    images, classes = digits()
    generator = torch.Generator().manual_seed(1)
    weights, losses, norms = [], [], []
    for step in range(STEPS):
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        own = batch if is_alone else batch.split(SHARES)[rank]
        mean, share = nn.functional.cross_entropy(model(images[own]), classes[own]), len(own) / BATCH
        loss = mean if fault == "mean of means" else mean * share
        model.zero_grad()
        loss.backward()
        if step == 0:
            first = whole(gradients(model))
        if fault == "norm of the shard":
            norm = torch.stack([local(gradient).norm() for gradient in gradients(model)]).norm()
            for gradient in gradients(model):
                local(gradient).mul_((NORM / norm).clamp(max=1))
        else:
            norm = whole([nn.utils.clip_grad_norm_(model.parameters(), NORM)])[0]
        norms.append(float(norm))
        optimizer.step()
        weights.append(whole([*model.parameters()]))
        losses.append(mean.detach() * share)
    if not is_alone:
        dist.all_reduce(total := torch.stack(losses))
        losses = [*total]
    return {"weights": weights, "gradient": first, "losses": [float(loss) for loss in losses], "norms": norms}


def faults() -> dict[str, Any]:
    """Return each fault's differences from one process, and this rank's norms (*collective*)."""
    alone = train(None)
    results: dict[str, Any] = {"one process": {"losses": alone["losses"], "norm": alone["norms"][0]}}
    for fault in FAULTS:
        trained = train(fault)
        results[fault] = {
            "gradient": difference(trained["gradient"], alone["gradient"]),
            "weights": [difference(*pair) for pair in zip(trained["weights"], alone["weights"], strict=True)],
            "moved": float((trained["weights"][-1] - whole([*network().parameters()])).norm()),
            "losses": trained["losses"],
            "norm": trained["norms"][0],
        }
    return results


def swapped() -> dict[str, Any]:
    """Return what ranks see if rank 0 runs block 0 and rank 1 block 1, of the same size (*collective*)."""
    rank, (images, classes) = dist.get_rank(), digits()
    parts = [(images[:32], classes[:32]), (images[32:64], classes[32:64])]
    plain = network()
    outputs = [plain(x, number) for number, (x, _) in enumerate(parts)]
    for output, (_, y) in zip(outputs, parts, strict=True):
        (nn.functional.cross_entropy(output, y) / 2).backward()
    model = shard(network())
    output = model(parts[rank][0], rank)
    (nn.functional.cross_entropy(output, parts[rank][1]) / 2).backward()
    seen, own = block(model, rank).seen, block(plain, rank).linear.weight
    other = block(plain, 1 - rank).linear.weight
    assert seen is not None
    rows = {"own rows": (seen == own).all(1).double().mean(), "other's rows": (seen == other).all(1).double().mean()}
    gradient = block(model, rank).linear.weight.grad
    assert gradient is not None
    assert own.grad is not None
    return {
        **{name: float(share) for name, share in rows.items()},
        "output": difference(output.detach(), outputs[rank].detach()),
        "gradient of the shard": difference(local(gradient), own.grad.chunk(2)[rank]),
    }


def hybrid() -> dict[str, float]:
    """Return what a rank of two groups of two holds, and the gradient's error (*collective*)."""
    images, classes = (values[:BATCH] for values in digits())
    plain = network()
    nn.functional.cross_entropy(plain(images), classes).backward()
    model = shard(network(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    x, y = (values.split((30, 18, 12, 4))[dist.get_rank()] for values in (images, classes))
    (nn.functional.cross_entropy(model(x), y) * len(x) / BATCH).backward()
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    held = sum(local(tensor).numel() for tensor in (*model.parameters(), *gradients(model)))
    return {
        "weights and gradients": held / parameters,
        "error": difference(whole(gradients(model)), whole(gradients(plain))),
    }


def on_two() -> dict[str, Any]:
    """Return all that two ranks measure (*collective*)."""
    return {"per parameter": holdings(), "faults": faults(), "different blocks": swapped()}


def measure() -> dict[str, Any]:
    """Return numbers held and sent per parameter, differences by fault, and what different blocks do."""
    ranks = on_ranks(on_two, 2)
    numbers = {
        "per parameter": ranks[0]["per parameter"],
        "faults": ranks[0]["faults"],
        "norms of the shards": [rank["faults"]["norm of the shard"]["norm"] for rank in ranks],
        "different blocks": [rank["different blocks"] for rank in ranks],
        "hybrid": on_ranks(hybrid, 4)[0],
    }
    for fault in FAULTS:
        curve = numbers["faults"][fault].pop("weights")
        numbers["faults"][fault]["weights"] = {
            str(step): curve[step - 1] for step in (1, 2, 5, *range(10, STEPS + 1, 10))
        }
    for results in numbers["faults"].values():
        results["losses"] = [results["losses"][0], results["losses"][-1]]
    return numbers


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw what a rank holds by strategy, and the difference of the weights by fault and step."""
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    rows = numbers["per parameter"]
    bottom = [0.0] * len(rows)
    for part, colour in (("weights", "#2471a3"), ("gradients", "#b7950b"), ("optimizer state", "#7f8c8d")):
        heights = [row[part] for row in rows.values()]
        left.bar([*rows], heights, bottom=bottom, color=colour, label=words(part))
        bottom = [sum(pair) for pair in zip(bottom, heights, strict=True)]
    left.set_ylabel(words("numbers per parameter, two ranks"))
    left.set_ylim(0, 5.6)
    left.legend(fontsize=8, loc="upper right")
    styles = {
        "optimizer made before": ("#7d3c98", "-"),
        "mean of means": ("#c0392b", "-"),
        "norm of the shard": ("#e67e22", "--"),
        "none": ("#1e8449", "-"),
    }
    for fault, (colour, style) in styles.items():
        curve = numbers["faults"][fault]["weights"]
        name = words("no fault") if fault == "none" else words(fault)
        right.semilogy([int(step) for step in curve], [*curve.values()], style, color=colour, label=name)
    right.set_xlabel(words("optimizer step"))
    right.set_title(words("Weights: relative difference from one process"), fontsize=10)
    right.set_ylim(1e-17, 1e6)
    right.legend(fontsize=8, loc="upper right", ncols=2)


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the GB of a rank: 8e9 parameters, AdamW in float32, 16 ranks in groups of 8 that divide the weights."""
    return math.isclose(float(answer), 8e9 * 4 * 4 / 8 / 1e9, rel_tol=0.01)


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "weights": "权重",
        "gradients": "梯度",
        "optimizer state": "优化器状态",
        "numbers per parameter, two ranks": "每个参数占几个数（两个 rank）",
        "no fault": "没有错误",
        "mean of means": "均值的均值",
        "norm of the shard": "只算分片的范数",
        "optimizer made before": "优化器建得太早",
        "optimizer step": "优化器步数",
        "Weights: relative difference from one process": "权重与单进程的相对差异",
    },
)
