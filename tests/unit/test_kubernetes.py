"""What is asked of Kubernetes: manifests that have the form of Kubeflow's and JobSet's types; no cluster is needed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli.main import main
from lockstep.launchers.kubernetes import FORMS

from ..command import refusal

Capture = pytest.CaptureFixture[str]
NEEDED = ("--image", "registry/me:1", "--volume", "claim:/storage")
KINDS = {
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "JobSet": "JobsetV1alpha2JobSet",
}
"""{kind: its class in Kubeflow's package, made from the published schemas}"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _manifests(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    """Return the manifests of a dry run; each has the form of its type, and no field that the type lacks."""
    assert main(["submit", "kubernetes", *NEEDED, *words]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    models = importlib.import_module("kubeflow_trainer_api.models")
    for document in documents:
        read = getattr(models, KINDS[document["kind"]]).from_dict(document)
        assert read.to_dict() == document
    return documents


def _pods(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the job's and the pods' specification in that of a JobSet."""
    (job,) = spec["replicatedJobs"]
    return job["template"]["spec"], job["template"]["spec"]["template"]["spec"]


def test_a_job_set_has_a_pod_for_each_node_which_the_others_find_by_its_name(capsys: Capture, tmp_path: Path) -> None:
    job = ("--kind", "jobset", "--nodes", "2", "--gpus-per-node", "4", "--cpus-per-node", "16", "--mem", "64Gi")
    (document,) = _manifests(
        capsys, *job, "--dry-run", "--time", "2:00:00", "--namespace", "team", "digits", "--lr", "0.2"
    )
    assert document["metadata"] == {"name": "digits-resnet8", "namespace": "team"}
    spec, pods = _pods(document["spec"])
    assert (spec["completionMode"], spec["parallelism"], spec["completions"]) == ("Indexed", 2, 2)
    assert spec["activeDeadlineSeconds"] == 7200
    (container,) = pods["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"}}
    flags = "--output /storage/runs/digits-resnet8 --resume auto --devices 4 --nodes 2"
    flags += " --init-method tcp://digits-resnet8-node-0-0.digits-resnet8:29500 --timeout 1800 --accelerator cuda"
    assert container["command"] == ["lockstep", "train", "digits", "--lr", "0.2", *flags.split()]
    assert pods["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim"}
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/storage", "/dev/shm"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_pods_that_have_saved_and_stopped_start_again_and_others_fail(kind: str, capsys: Capture) -> None:
    *runtime, last = _manifests(capsys, "--kind", kind, "--max-restarts", "3", "digits")
    spec = last["spec"] if not runtime else runtime[0]["spec"]["template"]["spec"]
    job, pods = _pods(spec)
    assert (pods["restartPolicy"], job["backoffLimit"]) == ("Never", 0)  # which a podFailurePolicy needs
    (stopped, evicted) = job["podFailurePolicy"]["rules"]
    assert stopped == {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [75]}}
    assert evicted == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    actions = {rule["onJobFailureReasons"][0]: rule["action"] for rule in spec["failurePolicy"]["rules"]}
    assert actions["PodFailurePolicy"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert actions["DeadlineExceeded"] == "FailJobSet"
    assert (spec["failurePolicy"]["maxRestarts"], spec["failurePolicy"]["restartStrategy"]) == (3, "BlockingRecreate")


def test_a_train_job_names_its_runtime_which_has_the_pods(capsys: Capture) -> None:
    runtime, job = _manifests(capsys, "--nodes", "2", "--gpus-per-node", "amd.com/gpu:2", "digits")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == job["metadata"]["name"]
    assert job["spec"]["trainer"] == runtime["spec"]["mlPolicy"] == {"numNodes": 2}
    (container,) = _pods(runtime["spec"]["template"]["spec"])[1]["containers"]
    assert (container["name"], container["image"]) == ("node", "registry/me:1")
    assert container["resources"] == {"limits": {"amd.com/gpu": "2"}}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)


def test_a_script_stands_in_place_of_a_recipe_and_its_words_arrive_unchanged(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import lockstep\n")
    own = ["--text", 'it\'s "100%" $(HOME) $$ ü\\n', "--time", "3"]
    (document,) = _manifests(capsys, "--kind", "jobset", "--precision", "bf16", "--devices", "2", "train.py", *own)
    command = _pods(document["spec"])[1]["containers"][0]["command"]
    assert command[command.index("train.py") + 1 :] == [word.replace("$", "$$") for word in own]
    settled = "--precision bf16 --output /storage/runs/train --resume auto --devices 2"
    assert command[: command.index("train.py")] == ["lockstep", "run", *settled.split()]


@pytest.mark.parametrize(
    ("output", "name"), [("Train_2.py", "train-2"), ("3d.py", "run-3d"), ("é.py", "run"), (f"{'a-' * 30}.py", "")]
)
def test_a_script_gives_its_job_a_name_that_kubernetes_takes(
    capsys: Capture, tmp_path: Path, output: str, name: str
) -> None:
    (tmp_path / output).write_text("import lockstep\n")
    (document,) = _manifests(capsys, "--kind", "jobset", output)
    assert name in ("", document["metadata"]["name"])
    assert re.fullmatch(FORMS["--job-name"][0], document["metadata"]["name"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--output /elsewhere", "is not on --volume"),
        ("--output /storage/../elsewhere", "is not on --volume"),
        ("--job-name Digits", "all small"),
        ("--max-restarts -1", "from 0 up"),
        ("--launcher spawn", "leave --launcher out"),
        ("--rank 0 --world-size 2", "leave --rank out"),
        ("--gpus-per-node 2 --devices 4", "disagrees with --gpus-per-node 2"),
        ("--gpus-per-node 2 --accelerator cpu", "leave one out"),
        ("--nodes 2 --strategy dp", "take another"),
        ("--nodes 7 --devices 11", "on 77 devices"),
        ("--resume elsewhere", "a requeued job continues in its own folder"),
        ("--kind pod", "trainjob or jobset"),
    ],
)
def test_what_no_pod_could_honour_is_refused_here(words: str, part: str, capsys: Capture) -> None:
    assert part in refusal(capsys, "submit", "kubernetes", *NEEDED, "digits", *words.split())


def test_image_and_volume_are_asked_for(capsys: Capture) -> None:
    for flag, others in (("--image", NEEDED[2:]), ("--volume", NEEDED[:2])):
        assert f"No {flag} given" in refusal(capsys, "submit", "kubernetes", *others, "digits")
