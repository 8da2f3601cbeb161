"""`python -m tests.decoding FOLDER`: what becomes of each image of a folder, as JSON, with 2 GiB of memory beside."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import psutil
import torchvision.transforms.v2  # noqa: F401  # loaded before the limit

from lockstep.data import folder
from lockstep.errors import RequestError

from .limited import ROOM

if __name__ == "__main__":
    most = psutil.Process().memory_info().vms + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    outcomes = {}
    for path in sorted(Path(sys.argv[1]).iterdir()):
        begun_s = time.monotonic()
        try:
            transform, least = folder.transform(224)
            outcomes[path.name] = str(tuple(transform(folder.decode(path, least)).shape))
        except RequestError as error:
            outcomes[path.name] = str(error)
        assert time.monotonic() - begun_s < 10, path
    print(json.dumps(outcomes))
