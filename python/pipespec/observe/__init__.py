"""What a run did, in numbers."""

from pipespec.observe.report import Report, StageReport

__all__ = ["Report", "StageReport"]
