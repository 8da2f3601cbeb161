"""`python -m lockstep`, which is also what torchrun starts: `torchrun -m lockstep train …`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
