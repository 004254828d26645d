"""``python -m pipespec``: the program ``pipespec``, for launchers that start a module: ``torchrun -m pipespec generate``."""

import sys

from pipespec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
