"""What the libraries of trackers keep, read back: `python tests/tracked.py LIBRARY FOLDER` prints it as JSON.

It runs in the trackers' own environment (`make trackers`). Each of the starts of a run is {"id", "losses": [[step,
train/loss], …], "config", "exit", "proof"}; MLflow and Trackio keep one for all starts.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7  # bytes of the LevelDB log, which W&B and SwanLab write


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a LevelDB log after its header."""
    data, place, record = path.read_bytes(), _HEADER, b""
    while place + _HEADER <= len(data):
        if _BLOCK - place % _BLOCK < _HEADER:
            place += _BLOCK - place % _BLOCK
        _, size, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        place += _HEADER + size
        record += data[place - size : place]
        if kind in (1, 4):  # whole, or last
            yield record
            record = b""


def wandb(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the offline runs of W&B."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        start: dict[str, Any] = {"losses": [], "exit": None}
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                start["id"] = record.run.run_id
                start["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.WhichOneof("record_type") == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                start["losses"] += [(row["step"], row["train/loss"])] if "train/loss" in row else []
            elif record.WhichOneof("record_type") == "exit":
                start["exit"] = record.exit.exit_code
        yield start | {"proof": (path.parent / "files" / "proof.md").read_text()}


def swanlab(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the offline runs of SwanLab."""
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState

    for path in sorted(folder.glob("swanlog/run-*/*.swanlab")):
        start: dict[str, Any] = {"losses": [], "exit": None}
        for data in records(path):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "start":
                start["id"] = record.start.id
            elif kind == "scalar" and record.scalar.key == "train/loss":
                start["losses"].append((record.scalar.step, record.scalar.value.number))
            elif kind == "finish":
                start["exit"] = RunState.Name(record.finish.state)
        config = yaml.safe_load((path.parent / "files" / "config.yaml").read_text())
        start["config"] = {key: item["value"] for key, item in config.items()}
        yield start | {"proof": (path.parent / "files" / "proof.md").read_text()}


def trackio(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the local runs of Trackio, whose database is in the folder `trackio`."""
    import sqlite3

    database = sqlite3.connect(folder / "trackio" / "lockstep.db")
    for name, config in database.execute("SELECT run_name, config FROM configs").fetchall():
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (name,))
        points = [(step, json.loads(values)) for step, values in rows]
        yield {
            "id": name,
            "losses": [(step, values["train/loss"]) for step, values in points if "train/loss" in values],
            "config": json.loads(config),
            "exit": points[-1][1]["exit"],
            "proof": points[-1][1]["proof.md"]["_value"],
        }


def mlflow(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs of MLflow; MLFLOW_TRACKING_URI says where they are."""
    from mlflow import MlflowClient
    from mlflow.artifacts import load_text

    client = MlflowClient()
    for run in client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]):
        points = client.get_metric_history(run.info.run_id, "train/loss")
        yield {
            "id": run.info.run_id,
            "losses": [(point.step, point.value) for point in points],
            "config": run.data.params,
            "exit": run.info.status,
            "proof": load_text(f"{run.info.artifact_uri}/proof.md"),
        }


if __name__ == "__main__":
    print(json.dumps([*globals()[sys.argv[1]](Path(sys.argv[2]))]))
