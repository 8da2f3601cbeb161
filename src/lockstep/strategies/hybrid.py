"""DataParallel within a process, DistributedDataParallel between processes: two levels.

A process, usually one a node, splits its share over several devices, whose gradients one backward pass sums; to DDP
they are one module. A device has what a rank of ddp would have there (see `BatchPlan`), and computes batch statistics
over that. One rank is dp, and one device a rank is ddp with local batch statistics.
"""

from __future__ import annotations

from .data_parallel import DataParallel
from .ddp import DDP


class Hybrid(DataParallel, DDP):
    """DDP over the ranks; each splits its share over its devices."""

    name = "hybrid"
