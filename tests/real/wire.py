"""`python wire.py MS LOSS`: a wire that delays what goes one way, in user space, for kernels without netem.

It makes two TAP interfaces where it is started, prints their names, and carries frames between them: each frame from
the first waits MS milliseconds, and LOSS percent of them are lost; from the second they pass at once.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LONGEST = 65536


def _tap() -> tuple[int, str]:
    """Return a new TAP interface's descriptor and name."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    named = fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"wire%d", _IFF_TAP | _IFF_NO_PI))
    return descriptor, named[:16].rstrip(b"\0").decode()


def main() -> None:
    """Carry frames until this process is killed."""
    delay_s, loss = float(sys.argv[1]) / 1000, float(sys.argv[2]) / 100
    (near, near_name), (far, far_name) = _tap(), _tap()
    print(near_name, far_name, flush=True)
    drawn = random.Random(0)
    waiting: list[tuple[float, int, bytes]] = []
    count = 0
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([near, far], [], [], wait_s)
        for descriptor in readable:
            frame = _read(descriptor)
            if descriptor == far:
                _write(near, frame)
            elif drawn.random() >= loss:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay_s, count, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _write(far, heapq.heappop(waiting)[2])


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _LONGEST)
    except OSError:  # the interface is down
        time.sleep(0.01)
        return b""


def _write(descriptor: int, frame: bytes) -> None:
    try:
        if frame:
            os.write(descriptor, frame)
    except OSError:  # the interface is down or its queue full: as on any wire, the frame is lost
        pass


if __name__ == "__main__":
    main()
