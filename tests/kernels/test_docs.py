"""The examples of docs/kernels.md run in their order."""

from __future__ import annotations

import re
from pathlib import Path

from pipespec_kernels import ops

TEXT = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_examples() -> None:
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(block, names)
    assert len(BLOCKS) == 5


def test_all_operations_are_listed() -> None:
    for name in ops.__all__:
        assert f"`{name}`" in TEXT or f"`{name}(" in TEXT or f"ops.{name}(" in TEXT, name
