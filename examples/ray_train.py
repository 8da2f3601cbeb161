"""Train a small net on the workers of a Ray cluster, by Ray Train's TorchTrainer; a lost worker is started again."""

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data import digits


def train(options: dict[str, Any]) -> None:
    """Train on one worker; Ray calls this on each."""
    with lockstep.session(output=options["output"], resume="auto", checkpoint_every=20) as session:
        images, labels = digits.read()["train"]
        data = TensorDataset(torch.tensor(images).flatten(1) / 16, torch.tensor(labels).long())
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(data, batch_size=64, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in session.epochs(options["epochs"]):
            for x, y in loader:
                session.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--output", type=Path, default=Path("runs/ray"), help="on a disk that all nodes share")
    args = parser.parse_args()
    ray.init(address=None)  # that of RAY_ADDRESS, or a cluster of this machine
    trainer = TorchTrainer(
        train,
        train_loop_config={"output": str(args.output.absolute()), "epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(
            name="ray", storage_path=str(args.output.absolute()), failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
