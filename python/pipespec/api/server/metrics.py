"""Metrics: what the calls of a server did, under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pipespec.api.output import Report


class ServerMetrics:
    """Counters, gauges and histograms of one server.

    Acceptance is counted as in vLLM: ``spec_decode_num_accepted_tokens_per_pos`` has, for each position, the verifications that accepted a draft token
    there. ``spec_decode_num_drafts`` counts all steps of the target, those without draft tokens too. ``name`` is the label ``model_name``.
    """

    def __init__(self, name: str) -> None:
        prometheus_client.disable_created_metrics()
        self._registry = CollectorRegistry()

        def new(kind: Any, metric: str, text: str, *labels: str) -> Any:
            made = kind(f"vllm:{metric}", text, ["model_name", *labels], registry=self._registry)
            return (lambda value: made.labels(name, value)) if labels else made.labels(name)

        self.running = new(Gauge, "num_requests_running", "Requests that generate.")
        self.waiting = new(Gauge, "num_requests_waiting", "Requests in the queue.")
        self._prompt = new(Counter, "prompt_tokens", "Tokens of prompts.")
        self._tokens = new(Counter, "generation_tokens", "Generated tokens.")
        self._queries = new(
            Counter, "prefix_cache_queries", "Tokens of prompts, looked up in what earlier calls have read."
        )
        self._hits = new(Counter, "prefix_cache_hits", "Tokens of prompts that were not read again.")
        self._ended = new(Counter, "request_success", "Requests by the reason of their end.", "finished_reason")
        self._first = new(Histogram, "time_to_first_token_seconds", "From a request to its first token.")
        self._each = new(Histogram, "time_per_output_token_seconds", "Of a text, between its first token and its last.")
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

    @contextmanager
    def request(self) -> Iterator[Ending]:
        """Around a request that runs: counts it under the reason that the block sets, ``"abort"`` without one."""
        ending = Ending()
        try:
            with self.running.track_inprogress():
                yield ending
        finally:
            self._ended(ending.reason).inc()

    def note_call(self, report: Report, prompt: int, since: float) -> None:
        """Count one call of ``generate()``. ``prompt``: tokens of its prompt. ``since``: when its request came."""
        target, now = report.stages[-1], time.monotonic()
        self._prompt.inc(prompt)
        self._queries.inc(prompt)
        self._hits.inc(report.prompt_tokens_reused)
        self._tokens.inc(report.tokens)
        self._first.observe(max(0.0, now - since - report.seconds + report.seconds_to_first_token))
        if report.tokens > 1:
            self._each.observe((report.seconds - report.seconds_to_first_token) / (report.tokens - 1))
        self._latency.observe(now - since)
        self._throughput.set(report.tokens_per_second)
        self._drafts.inc(target.steps)
        self._drafted.inc(target.drafted)
        self._accepted.inc(target.accepted)
        for position in range(len(target.histogram) - 1):
            self._by_position(str(position)).inc(sum(target.histogram[position + 1 :]))


class Ending:
    """How a request has ended."""

    reason = "abort"
