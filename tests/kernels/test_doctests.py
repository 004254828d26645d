"""The examples in the docstrings of the operations run and print what they say."""

import doctest

import pytest

from pipespec_kernels import kv, layers, ops

EXAMPLES = {ops: 5, kv: 1, layers: 3}


@pytest.mark.parametrize("module", EXAMPLES, ids=lambda module: module.__name__)
def test_examples(module) -> None:
    found = [
        test for test in doctest.DocTestFinder().find(module, globs=vars(ops) | {"torch": ops.torch}) if test.examples
    ]
    assert len(found) >= EXAMPLES[module], [test.name for test in found]
    runner = doctest.DocTestRunner()
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
