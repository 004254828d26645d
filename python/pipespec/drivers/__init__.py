"""Drivers: several ways to run the stages of a chain over one protocol."""

from pipespec.drivers.base import Decoder, Driver, GenerationRequest
from pipespec.drivers.factory import make_driver
from pipespec.drivers.graphed.rounds import RoundsDriver
from pipespec.drivers.graphed.streams import StreamsDriver
from pipespec.drivers.lockstep import LockstepDriver
from pipespec.drivers.workers.driver import WorkersDriver

__all__ = [
    "Decoder",
    "Driver",
    "GenerationRequest",
    "LockstepDriver",
    "RoundsDriver",
    "StreamsDriver",
    "WorkersDriver",
    "make_driver",
]
