"""How many trials a test makes: few for each change, all of them at night.

The environment variable ``PIPESPEC_TESTS`` is ``ci`` (the default) or ``nightly``. Every test runs under both. Only the numbers of trials, prompts
and Hypothesis examples differ. ``tests/native/check.hpp`` reads the same variable.
"""

import os

from hypothesis import HealthCheck, settings

PROFILE = os.environ.get("PIPESPEC_TESTS", "ci")
if PROFILE not in ("ci", "nightly"):
    raise ValueError(f"PIPESPEC_TESTS is {PROFILE!r}: use ci or nightly")

# No check of the machine's speed. Fixtures that every example shares are intended.
settings.register_profile(
    "pipespec",
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    # The examples of `ci` are the same in each run. Those of `nightly` are new, and a failure prints how to reproduce it.
    derandomize=PROFILE == "ci",
    print_blob=True,
)
settings.load_profile("pipespec")


def trials(ci: int, nightly: int) -> int:
    """``ci`` or ``nightly``, by the profile."""
    return nightly if PROFILE == "nightly" else ci
