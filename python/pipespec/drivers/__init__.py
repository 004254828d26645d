"""Drivers: who calls the step. One protocol, several ways to run the stages over it."""

from pipespec.drivers.base import Driver, Request, Runner
from pipespec.drivers.lockstep import LockstepDriver
from pipespec.drivers.making import make_driver
from pipespec.drivers.rounds import RoundsDriver
from pipespec.drivers.streams import StreamsDriver
from pipespec.drivers.workers import WorkersDriver

__all__ = [
    "Driver",
    "LockstepDriver",
    "Request",
    "RoundsDriver",
    "Runner",
    "StreamsDriver",
    "WorkersDriver",
    "make_driver",
]
