"""``python -m tests.support.torchrun RANKS ...``: what torchrun does for ``python ...``, with ranks as forks of this process, which save their imports."""

import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.forks import Fork, run
from tests.support.processes import fork_ranks, wait_all


class Torchrun(Fork):
    """``Popen`` of a command line that begins with ``python -m torch.distributed.run --standalone --nproc-per-node RANKS``."""

    def __init__(self, command: list[str], **options: Any) -> None:
        assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        super().__init__(["-m", "tests.support.torchrun", *command[5:]], **options)


def main() -> int:
    ranks, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as logs:
        ended = wait_all(fork_ranks(ranks, lambda rank: run(*command), logs))
        for log in Path(logs).iterdir():
            sys.stderr.write(log.read_text())
    return max(map(abs, ended.values()), default=1)


if __name__ == "__main__":
    sys.exit(main())
