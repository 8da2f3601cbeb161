"""Checkpoints: one format for every strategy, that no kill can break and no flipped bit can pass.

    RUN/checkpoints/
      step-00000512/            written under a hidden name, synced to the disk, then renamed: it is whole or not there
        model.safetensors       tensors `model/...`; likewise optimizer.safetensors, ema.safetensors: one file a group
        state.json              the rest: step, epoch, seed, plan, config, states of random number generators
        checksums.json          SHA-256 of each file above
      last -> step-00000512     relative links, replaced atomically
      best -> step-00000384

Saving costs the training one copy of the tensors; a thread writes them while training goes on. Kept are the
checkpoints that `last` and `best` point to and the one that was last before, so that a damaged one leaves a good one.

Nothing here can run code: tensors are safetensors, the rest is JSON. Loading verifies every checksum first, and what
does not match is refused with the newest checkpoint that is whole, from which a run that goes on by itself goes on.
"""

from .read import find, fingerprint, load, load_good, peek
from .write import Checkpoints

__all__ = ["Checkpoints", "find", "fingerprint", "load", "load_good", "peek"]
