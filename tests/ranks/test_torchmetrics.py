"""torchmetrics in an evaluation: the scores of one process over all samples, whatever the ranks' shares."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.world.world import World

from .. import loops
from ..needs import need
from ..pool import RankPool

pytestmark = pytest.mark.slow
EQUAL = 1e-12
CLASSES = 3


def setup_module() -> None:
    need([] if find_spec("torchmetrics") else ["torchmetrics"])


def metrics(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metrics of (probabilities, labels), and of two columns of numbers."""
    from torchmetrics import CatMetric, MeanSquaredError, PearsonCorrCoef, SpearmanCorrCoef
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassAveragePrecision

    of_classes = {kind.__name__: kind(CLASSES, **options) for kind in (MulticlassAccuracy, MulticlassAUROC)}
    of_classes["precision"] = MulticlassAveragePrecision(CLASSES, thresholds=None, **options)
    of_numbers = {kind.__name__: kind(**options) for kind in (MeanSquaredError, PearsonCorrCoef, SpearmanCorrCoef)}
    of_numbers["order"] = CatMetric(**options)
    for metric in (*of_classes.values(), *of_numbers.values()):
        metric.set_dtype(torch.float64)
    return of_classes, of_numbers


def update(of_classes: dict[str, Any], of_numbers: dict[str, Any], probabilities: Tensor, y: Tensor) -> None:
    for metric in of_classes.values():
        metric.update(probabilities, y)
    for name, metric in of_numbers.items():
        metric.update(*((probabilities[:, 0],) if name == "order" else (probabilities[:, 0], y.double())))


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)
    return TensorDataset(x.softmax(dim=1), torch.randint(0, CLASSES, (count,), generator=generator))


def scores(world: World, count: int, gathers: bool) -> dict[str, list[float]]:
    """Return the scores of an evaluation, by metrics that exchange states, or on gathered samples."""
    session = loops.session(world)
    session.prepare(nn.Linear(1, 1))
    of_classes, of_numbers = metrics(sync_on_compute=not gathers)
    for probabilities, y in session.evaluating(DataLoader(samples(count), batch_size=10)):
        rows = (session.gather(probabilities), session.gather(y)) if gathers else (probabilities, y)
        update(of_classes, of_numbers, *rows)
    found = {name: metric.compute().reshape(-1).tolist() for name, metric in (of_classes | of_numbers).items()}
    session.close()
    return found


@pytest.mark.parametrize(("count", "gathers"), [(47, False), (47, True), (2, True)])
def test_a_metric_has_the_score_of_one_process(pool: RankPool, count: int, gathers: bool) -> None:
    of_classes, of_numbers = metrics()
    update(of_classes, of_numbers, *samples(count).tensors)
    expected = {name: metric.compute().reshape(-1).tolist() for name, metric in (of_classes | of_numbers).items()}
    order = expected.pop("order")
    for size in (2, 3):
        for found in pool.run(size, scores, count, gathers):
            rows = found.pop("order")
            assert sorted(rows) == sorted(order)
            assert (rows == order) == gathers  # states are joined in the order of the ranks
            for name, values in expected.items():
                assert found[name] == pytest.approx(values, rel=EQUAL, abs=EQUAL, nan_ok=True), name
