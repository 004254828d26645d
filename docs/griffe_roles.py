"""References of docstrings such as ``:func:`pipespec.attach` `` become links on the site, or code where the site has no such name."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`(~?)([\w.]+)`")


def _link(match: re.Match[str]) -> str:
    name = match[2]
    shown = name.rpartition(".")[2] if match[1] or "." in name else name
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'


class Roles(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_link, obj.docstring.value)
