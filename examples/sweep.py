"""Search a learning rate and a momentum with Optuna; each trial trains on several ranks.

    pip install optuna
    python examples/sweep.py --trials 20 --devices 2 --storage sqlite:///sweep.db

Several hosts may share one storage: each starts the same command and takes the next trial.
"""

import argparse
from functools import partial

import optuna
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data import digits


def train(lr: float, momentum: float, epochs: int) -> float:
    """Train a small net on every rank; return the accuracy on all test images."""
    session = lockstep.session(seed=0)
    images, labels = digits.read()["train"]
    images, labels = torch.tensor(images).flatten(1) / 16, torch.tensor(labels).long()
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(epochs):
        for x, y in loader:
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    images, labels = digits.read()["test"]
    scores = model(torch.tensor(images).flatten(1).to(session.device) / 16)
    return (scores.argmax(1).cpu() == torch.tensor(labels)).double().mean().item()


def objective(trial: optuna.Trial, devices: int, epochs: int) -> float:
    lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    momentum = trial.suggest_float("momentum", 0.0, 0.95)
    return lockstep.launch(partial(train, lr, momentum, epochs), devices=devices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--storage", help="such as sqlite:///sweep.db, which keeps the trials; default: none")
    args = parser.parse_args()
    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(
        study_name="digits", storage=args.storage, load_if_exists=True, direction="maximize", sampler=sampler
    )
    study.optimize(partial(objective, devices=args.devices, epochs=args.epochs), n_trials=args.trials)
    print(f"best of {len(study.trials)} trials: accuracy {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
