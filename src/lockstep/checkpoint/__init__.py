"""Checkpoints: one format for every strategy, written atomically, verified by checksums.

    RUN/checkpoints/
      step-00000512/            written under a hidden name, synced to disk, then renamed: complete or absent
        model.safetensors       tensors `model/...`; likewise optimizer.safetensors, ema.safetensors: one file per group
        state.json              all other state: step, epoch, seed, plan, config, states of random number generators
        checksums.json          SHA-256 of each file above
      last -> step-00000512     relative links, replaced atomically
      best -> step-00000384

Saving blocks training for one copy of the tensors; a background thread writes the files. The linked checkpoints and, by
default, the one before the last are kept, so that one damaged checkpoint leaves an intact one. Loading verifies every
checksum, and runs no code.
"""

from .read import find, fingerprint, load, peek
from .write import Checkpoints

__all__ = ["Checkpoints", "find", "fingerprint", "load", "peek"]
