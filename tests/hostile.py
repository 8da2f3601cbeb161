"""What somebody may put into a name, an image or an environment to have a reader of it do something else."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from PIL import Image

NAME = "a\x1b[31m\x1b]0;t\x07\x9b2J\u202eb\u2066\r\nlockstep: forged [red]c[/] [link=x:y]d :smile:\x7f"
"""A name of a file, a class, a tensor or a key."""
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def often(test: Callable[..., None]) -> Callable[..., None]:
    """Draw 300 cases, the same in every run; with --hypothesis-profile slow 10,000, other ones in each."""
    is_slow = settings.get_current_profile_name() == "slow"
    if is_slow:
        pytest.mark.timeout(3600)(test)
    return settings(max_examples=10_000 if is_slow else 300)(test)


def obeyed(text: bytes) -> list[str]:
    """Return the characters in `text` that a terminal obeys, or that turn the direction of reading."""
    return _OBEYED.findall(text.decode(errors="replace"))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, *, more: bytes = b"", pixels: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(pixels or bytes((3 * width + 1) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + more + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _many_scans() -> bytes:
    file = io.BytesIO()
    Image.new("L", (6000, 6000)).save(file, "JPEG", progressive=True, quality=10)
    data = file.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * 1000 + data[-2:]


def _many_tags() -> bytes:
    count, size = 60_000, 1 << 20
    place = 8 + 2 + 12 * count + 4
    sides = {256: (3, 1, 1), 257: (3, 1, 1), 258: (3, 1, 8), 262: (3, 1, 1), 273: (4, 1, place), 279: (4, 1, 1)}
    tags = (struct.pack("<HHII", tag, *sides.get(tag, (1, size, place))) for tag in range(count))
    return b"II*\0" + struct.pack("<IH", 8, count) + b"".join(tags) + bytes(4 + size)


def images() -> dict[str, tuple[bytes, str]]:
    """Return small files that would cost much, by name, and a word of the refusal; "" for those that are images."""
    text = b"".join(_chunk(b"zTXt", b"a%d\0\0" % i + zlib.compress(bytes(1 << 20), 9)) for i in range(100))
    profile = _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 27), 9))
    return {
        "tall.png": (_png(1, 40_000), ""),
        "wide.png": (_png(40_000, 1), ""),
        "tags.tif": (_many_tags(), ""),
        "pixels.png": (_png(100_000, 100_000, pixels=b"\0"), "pixels"),
        "text.png": (_png(1, 1, more=text), "text"),
        "profile.png": (_png(1, 1, more=profile), "too large"),
        "scans.jpg": (_many_scans(), "scans"),
        "cut.png": (_png(64, 64)[:60], "truncated|broken"),
        "script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n", "none of JPEG, PNG"),
        "cursor.png": (b"\0\0\2\0\1\0" + bytes(60), "none of JPEG, PNG"),
    }


def _originals() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    made = []
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF", "GIF"):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind)
        made.append(file.getvalue())
    return made


@st.composite
def mutated_images(draw: st.DrawFn) -> bytes:
    """Draw a file of an image of which a few bytes, most of them of its header, are others, or the rest is missing."""
    data = bytearray(draw(st.sampled_from(_originals())))
    for _ in range(draw(st.integers(1, 6))):
        end = draw(st.sampled_from([64, len(data)]))
        data[draw(st.integers(0, min(end, len(data)) - 1))] = draw(st.sampled_from([0, 1, 127, 128, 255, 32, 65]))
    return bytes(data[: draw(st.sampled_from([len(data), len(data) // 2, 30]))])


_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    *("SLURM_NODEID", "SLURM_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NTASKS_PER_NODE"),
    *(f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "STEP", "COUNT")),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_SERVER_TMPDIR", "PMIX_NAMESPACE"),
    *("CUDA_VISIBLE_DEVICES",),
)
_VALUES = st.one_of(
    st.sampled_from(["0", "1", "2", "3", "4"]),
    st.sampled_from(["", "-1", "9" * 10, "9" * 5000, "٣", "²", "1_0", " 1", "1.5", "0x1", "None", "x" * 5000]),
    st.sampled_from(["n[1-99999999]", "n[3-1]", "n[", "n]", "n[1-2][3", "1(x99999999)", "2(x3),1", "9" * 9, ",", "n,"]),
    st.sampled_from([NAME, "\udcff", "../..", "-x", "/dev/zero", "::1", "tcp://h:1"]),
    st.text(st.characters(exclude_characters="\0"), max_size=8),
)


def environments(base: dict[str, str]) -> st.SearchStrategy[dict[str, str]]:
    """Draw variables of programs that start ranks, over `base`, with values that none of them sets."""
    names = st.sampled_from(sorted(base) or _VARIABLES) | st.sampled_from(_VARIABLES)
    return st.dictionaries(names, _VALUES, min_size=1, max_size=3).map(lambda drawn: base | drawn)
