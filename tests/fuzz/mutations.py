"""Strategies for damaged files and wrong values, and a process of its own for what may crash."""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from tests.trials import trials

SECONDS = 60
"""Until an example counts as hung. Each takes milliseconds."""


def examples(ci: int, nightly: int) -> settings:
    """So many examples of each profile."""
    return settings(max_examples=trials(ci, nightly))


# ---- values

ODD_NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 7, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, -(2**31), -(2**63), 0.0, -0.0, 0.5, -0.5,
     1e-320, 1e300, -1e300, float("inf"), -float("inf"), float("nan")]
)  # fmt: skip
ODD_TEXTS = st.sampled_from(
    [
        "",
        " ",
        "0",
        "1",
        "-1",
        "nan",
        "x",
        "\0",
        "é\u2028",
        "\ud800",
        "../x",
        "/",
        "a" * 300,
        "None",
        "[]",
        "%s",
        "{0}",
        "\n",
    ]
)
SCALARS = st.one_of(st.none(), st.booleans(), ODD_NUMBERS, st.integers(-5, 400), ODD_TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["", "a", "name", "data", "row"]), inner, max_size=3),
    ),
    max_leaves=5,
)
"""Whatever JSON can hold."""


# ---- files


@st.composite
def mutated_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` with a few bytes changed, removed, repeated or inserted; or other bytes."""
    if draw(st.integers(0, 15)) == 0:
        return draw(st.binary(max_size=64))
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(found)))
        match draw(st.sampled_from(["flip", "set", "cut", "drop", "insert", "repeat"])):
            case "flip" if at < len(found):
                found[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                new = draw(st.binary(min_size=1, max_size=8))
                found[at : at + len(new)] = new
            case "cut":
                del found[at:]
            case "drop":
                del found[at : at + draw(st.integers(1, 16))]
            case "insert":
                found[at:at] = draw(
                    st.one_of(st.binary(max_size=8), st.sampled_from([b"[" * 100_000, b"9" * 5000, b"\0" * 64]))
                )
            case "repeat":
                found[at:at] = found[at : at + draw(st.integers(1, 32))]
    return bytes(found)


@st.composite
def mutated(draw: st.DrawFn, record: Any) -> Any:
    """A copy of a JSON value in which a few entries, at any depth, have been replaced, removed, added or doubled."""
    found = copy.deepcopy(record)
    for _ in range(draw(st.integers(1, 3))):
        where: Any = found
        while isinstance(where, (dict, list)) and where:
            keys = list(where) if isinstance(where, dict) else list(range(len(where)))
            key = draw(st.sampled_from(keys))
            if isinstance(where[key], (dict, list)) and where[key] and draw(st.integers(0, 3)) > 0:
                where = where[key]
                continue
            match draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "double"])):
                case "replace":
                    where[key] = draw(VALUES)
                case "remove":
                    del where[key]
                case "add" if isinstance(where, dict):
                    where[draw(st.sampled_from(["", "more", "version"]))] = draw(VALUES)
                case _ if isinstance(where, list):
                    where.append(copy.deepcopy(where[key]))
            break
        else:
            return draw(VALUES)
    return found


def mutated_json(record: Any) -> st.SearchStrategy[bytes]:
    """The file of a JSON value, with damage to the value or to the bytes."""
    text = json.dumps(record, indent=1).encode()
    return st.one_of(
        mutated(record).map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")), mutated_bytes(text)
    )


def check_names(error: Exception, file: Path) -> None:
    """Check that the message of a refusal names the file."""
    assert str(file) in str(error), str(error)


# ---- processes

REPEAT_HERE = False
"""Whether an example that passed in its child runs in this process, too. `guided` sets it: it sees no coverage of a child."""


def in_child(function: Callable[[], None], *, memory: int | None = None) -> None:
    """Call ``function`` in a child of this process, and fail as it does. A crash and a hang are failures of the example, not of the test run.

    Args:
        function: Raises where the example fails.
        memory: How many bytes the child may take beyond what this process has.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            if memory is not None:
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
            function()
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as said:
        error = said.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, error or f"ended by {signal.Signals(-status).name}"
    if REPEAT_HERE:
        function()
