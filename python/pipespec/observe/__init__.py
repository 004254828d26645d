"""Reports, traces and streamed text of calls."""

from pipespec.observe.report import Report, StageReport

__all__ = ["Report", "StageReport"]
