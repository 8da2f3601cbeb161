"""`lockstep verify WHAT …`: proofs that N devices train one device's model.

Each proof is a file beside this one.
"""

from __future__ import annotations

from importlib import import_module

from ...errors import RequestError, choose
from .. import output

PROOFS = {
    "gradients": "gradients of N ranks against one process: lockstep verify gradients RECIPE|SCRIPT",
    "curve": "short runs of all variants, and where they diverge: lockstep verify curve RECIPE|SCRIPT",
}
_LISTED = "\n".join(f"  {name:<10} {phrase}" for name, phrase in PROOFS.items())
USAGE = f"""\
usage: lockstep verify WHAT …

{_LISTED}

lockstep verify WHAT --help describes each. Exit code: 0 it holds, 3 it does not, 2 it cannot be checked.
"""


def main(words: list[str]) -> int:
    """Run the named proof, and return the exit code."""
    proof = words[0] if words else ""
    if proof == "help":
        output.show(USAGE)
        return 0
    if not proof or proof.startswith("-"):
        raise RequestError(f"No proof given, found {proof or 'nothing'}; use lockstep verify {' or '.join(PROOFS)}.")
    if proof == "run":
        raise RequestError(
            "lockstep verify run no longer exists: read proof.md in the run's folder, or use lockstep verify "
            "gradients or curve."
        )
    return output.call(import_module(f".{choose('proof', proof, PROOFS)}", __package__), words[1:])
