"""A pytest plugin: the Hypothesis tests that are selected get inputs from Atheris, which keeps those that reach new lines of the packages.

    pip install atheris
    PIPESPEC_FUZZ_SECONDS=600 python -m pytest -s -p tests.fuzz.guided tests/fuzz/test_files.py

Each test runs for so many seconds in a child of its own, because libFuzzer ends the process. A failure ends its test and prints the values that were
drawn. The inputs are kept under ``.hypothesis/guided``, and the next run begins with them. Their bytes belong to one version of Hypothesis and of the
test, so none is in the tree: a fault that was found becomes an ``@example``. Coverage is that of the Python code. C++ code is seen by what it answers.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import atheris
import pytest
from hypothesis import Verbosity, given, settings

from tests.fuzz import mutations

SECONDS = int(os.environ.get("PIPESPEC_FUZZ_SECONDS", "60"))
# Tests may change the working folder.
CORPUS = Path(".hypothesis/guided").resolve()

# The import hook stays for the whole run.
atheris.instrument_imports(include=["pipespec", "pipespec_kernels"]).__enter__()
mutations.REPEAT_HERE = True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    handle = getattr(pyfuncitem.obj, "hypothesis", None)
    if handle is None:
        return None
    strategies = handle._given_kwargs
    names = set(pyfuncitem._fixtureinfo.argnames) - set(strategies)
    fixtures = {name: pyfuncitem.funcargs[name] for name in names}

    def example(**values: Any) -> None:
        handle.inner_test(**fixtures, **values)

    child = os.fork()
    if child == 0:
        _fuzz(pyfuncitem.nodeid, example, strategies)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"{pyfuncitem.nodeid}: the fuzzer ended with status {status}; its output has the values"
    return True


def _fuzz(node: str, example: Callable[..., None], strategies: dict[str, Any]) -> NoReturn:
    run = given(**strategies)(example).hypothesis.fuzz_one_input
    show = settings(verbosity=Verbosity.verbose)(given(**strategies)(example)).hypothesis.fuzz_one_input

    def one(data: bytes) -> None:
        try:
            run(data)
        except BaseException:
            show(data)
            raise

    folder = CORPUS / hashlib.sha1(node.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    folder.with_suffix(".txt").write_text(f"{node}\n")
    # Most inputs of a few bytes end before the test's last draw, so lengths are not held small at first.
    options = [f"-max_total_time={SECONDS}", "-len_control=0", "-max_len=8192", "-timeout=300", "-rss_limit_mb=0", "-print_final_stats=1",
               f"-artifact_prefix={folder}.", str(folder)]  # fmt: skip
    try:
        atheris.Setup([sys.argv[0], *options], one)
        atheris.Fuzz()
    finally:
        os._exit(1)
