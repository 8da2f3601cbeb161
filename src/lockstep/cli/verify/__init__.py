"""`lockstep verify WHAT …`: proofs that N devices train one device's model.

Each proof is a file beside this one.
"""

from __future__ import annotations

from importlib import import_module

from ...errors import RequestError, choose

PROOFS = ("gradients", "curve")


def main(words: list[str]) -> int:
    """Run the named proof, and return the exit code."""
    proof = words[0] if words else ""
    if not proof or proof.startswith("-"):
        raise RequestError(f"No proof given; use lockstep verify {' or '.join(PROOFS)}.")
    if proof == "run":
        raise RequestError(
            "lockstep verify run no longer exists: read proof.md in the run's folder, or use lockstep verify "
            "gradients or curve."
        )
    code: int = import_module(f".{choose('proof', proof, PROOFS)}", __package__).main(words[1:])
    return code
