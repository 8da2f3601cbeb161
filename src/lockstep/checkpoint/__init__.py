"""Checkpoints: one format for every strategy, written atomically, verified by checksums.

    RUN/checkpoints/
      step-00000512/            written under a hidden name, synced to the disk, then renamed: it is whole or not there
        model.safetensors       tensors `model/...`; likewise optimizer.safetensors, ema.safetensors: one file a group
        state.json              the rest: step, epoch, seed, plan, config, states of random number generators
        checksums.json          SHA-256 of each file above
      last -> step-00000512     relative links, replaced atomically
      best -> step-00000384

Saving costs the training one copy of the tensors; a thread writes them meanwhile. Kept are the checkpoints of the links
and the one before the last, so that a damaged one leaves a good one. Loading verifies every checksum, and runs no code.
"""

from .read import find, fingerprint, load, peek
from .write import Checkpoints

__all__ = ["Checkpoints", "find", "fingerprint", "load", "peek"]
