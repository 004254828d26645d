"""The figures of ``GET /metrics``, under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class ServerMetrics:
    """Counters, gauges and histograms of one server.

    Acceptance is counted as in vLLM: ``spec_decode_num_accepted_tokens_per_pos`` has, for each position, the verifications that accepted a draft token
    there. ``spec_decode_num_drafts`` counts all steps of the target, those without draft tokens too. ``name`` is the label ``model_name``.
    """

    def __init__(self, name: str) -> None:
        self._registry = CollectorRegistry()

        def new(kind: Any, metric: str, text: str, *labels: str) -> Any:
            made = kind(f"vllm:{metric}", text, ["model_name", *labels], registry=self._registry)
            return (lambda value: made.labels(name, value)) if labels else made.labels(name)

        self._running = new(Gauge, "num_requests_running", "Requests that generate.")
        self._waiting = new(Gauge, "num_requests_waiting", "Requests in the queue.")
        self._prompt = new(Counter, "prompt_tokens", "Tokens of prompts.")
        self._tokens = new(Counter, "generation_tokens", "Generated tokens.")
        self._ended = new(Counter, "request_success", "Requests by the reason of their end.", "finished_reason")
        self._first = new(Histogram, "time_to_first_token_seconds", "From a request to its first token.")
        self._latency = new(Histogram, "e2e_request_latency_seconds", "From a request to its last token.")
        self._throughput = new(Gauge, "avg_generation_throughput_toks_per_s", "Tokens/s of the last request.")
        self._drafts = new(Counter, "spec_decode_num_drafts", "Steps of the target.")
        self._drafted = new(Counter, "spec_decode_num_draft_tokens", "Draft tokens that the target verified.")
        self._accepted = new(Counter, "spec_decode_num_accepted_tokens", "Draft tokens that it accepted.")
        self._by_position = new(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", "position"
        )

    def text(self) -> str:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def enter(self) -> float:
        """Count a request that begins to wait. Returns the time."""
        self._waiting.inc()
        return time.monotonic()

    @contextmanager
    def request(self, since: float, prompt: int, config: Any, pipe: Any) -> Iterator[None]:
        """Around a request's call of ``pipe.generate()``: count what it did.

        Args:
            since: of :meth:`enter`.
            config: Its ``max_new_tokens`` is the limit, or None once something else has ended the text.
            pipe: The pipeline, whose ``report`` describes the call afterwards.
        """
        self._waiting.dec()
        start, reason = time.monotonic(), "abort"
        try:
            with self._running.track_inprogress():
                yield
            report, target = pipe.report, pipe.report.stages[-1]
            reason = "length" if report.tokens == config.max_new_tokens else "stop"
            self._prompt.inc(prompt)
            self._tokens.inc(report.tokens)
            self._first.observe(start - since + report.seconds_to_first_token)
            self._latency.observe(time.monotonic() - since)
            self._throughput.set(report.tokens_per_second)
            self._drafts.inc(target.steps)
            self._drafted.inc(target.drafted)
            self._accepted.inc(target.accepted)
            for position in range(len(target.histogram) - 1):
                self._by_position(str(position)).inc(sum(target.histogram[position + 1 :]))
        finally:
            self._ended(reason).inc()
