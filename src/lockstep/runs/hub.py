"""A run's model in the layout of the Hugging Face Hub: weights, and a card with scores, options and proof."""

from __future__ import annotations

import tomllib
from pathlib import Path

import tomli_w

from ..errors import RequestError
from ..files import parse_json, read, shown, understanding, write_whole

_LOCAL = ("data-dir", "init-from", "init-method", "interface", "gpus", "resume", "output", "remote")
"""Options that name this machine's files and network."""


def write_folder(run: Path, folder: Path, weights: bytes, step: int) -> None:
    """Write `model.safetensors`, the `weights` of a run's `step`, and README.md to a new `folder`.

    The card's metadata have the test scores if the run evaluated that step's weights. Raises `RequestError` for a
    damaged or unfinished run; `OSError` for a folder that exists or cannot be written.
    """
    card = _card(run, step)
    folder.mkdir(parents=True)
    write_whole(folder / "model.safetensors", weights)
    write_whole(folder / "README.md", card.encode())


def push(folder: Path, repo: str) -> str:
    """Upload a folder to `repo` (OWNER/NAME), which is made, private, if it is not there; return the commit's URL.

    Endpoint and token are huggingface_hub's. Raises `RequestError` with its message.
    """
    import huggingface_hub as hub  # optional

    try:
        hub.create_repo(repo, private=True, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Model trained with lockstep"))
    except Exception as error:  # the hub's, or its client's, which are of several libraries
        cause = str(error).strip().partition("\n")[0]
        raise RequestError(f"{shown(folder)} is written, and not pushed to {repo}: {cause}") from error


def _card(run: Path, step: int) -> str:
    import huggingface_hub as hub

    with understanding(run):
        config = tomllib.loads(read(run / "config.toml").decode())
        summary = parse_json(read(run / "summary.json"))
        proof = read(run / "proof.md").decode()
        rows = [summary.get(name) for name in ("test", "test_best")]
        scores = {row["step"]: row for row in rows if row is not None}
        model, data = str(config["model"]), str(config["data"])
        steps, seed = int(summary["steps"]), int(config["seed"])
    task = "other" if ":" in data else "image-classification"
    results = [
        hub.EvalResult(task, data, data, kind, scores[step][name], dataset_split="test")
        for kind, name in (("accuracy", "top1"), ("loss", "loss"))
        if name in scores.get(step, {})
    ]
    metadata = hub.ModelCardData(
        library_name="pytorch", tags=["lockstep", model], model_name=run.name, eval_results=results or None
    )
    options = tomli_w.dumps({name: value for name, value in config.items() if name not in _LOCAL})
    lines = [
        *("---", metadata.to_yaml(), "---", f"# {run.name}", ""),
        f"`{model}` on `{data}`, trained by lockstep with seed {seed}. The weights are those of step "
        f"{step:,} of {steps:,}.",
        *("", "```python", "from safetensors.torch import load_file", ""),
        *('model.load_state_dict(load_file("model.safetensors"))', "```"),
    ]
    if scores:
        lines += ["", "## Test scores", "", "| weights of step | top-1 | top-5 | loss | samples |", "|" + " --: |" * 5]
        lines += [
            f"| {row['step']:,} | {row['top1']:.4f} | {row['top5']:.4f} | {row['loss']:.4f} | {row['samples']:,} |"
            for row in scores.values()
        ]
    lines += ["", proof.strip().replace("# ", "## ", 1), "", "## Options", "", "```toml", options.strip(), "```", ""]
    return "\n".join(lines)
