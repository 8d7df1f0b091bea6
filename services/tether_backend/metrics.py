"""The backend's figures, in a registry of their own. Names say the unit."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tether import metrics as process_metrics


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tether_http_requests", "Answered requests", ["route", "method", "status"], registry=self.registry
        )
        self.request_s = Histogram(
            "tether_http_request_seconds", "Time to the answer's start", ["route"], registry=self.registry
        )
        self.quota_used = Gauge(
            "tether_quota_used",
            "Use of a quota that is enforced here, as of the last look: prompts_per_minute, waiting_prompts, "
            "stored_bytes, readers",
            ["tenant", "limit"],
            registry=self.registry,
        )
        self.quota_limit = Gauge(
            "tether_quota_limit", "What that quota allows", ["tenant", "limit"], registry=self.registry
        )
        self.quota_refusals = Counter(
            "tether_quota_refusals", "Answers QUOTA_EXCEEDED", ["tenant", "limit"], registry=self.registry
        )
        self.readers = Gauge("tether_sse_readers", "Open event streams", registry=self.registry)
        self.cut = Counter("tether_sse_cut", "Readers that were cut for being slow", registry=self.registry)
        self.sse_bytes = Counter("tether_sse_bytes", "Bytes written to event streams", registry=self.registry)
        self.sse_writes = Counter("tether_sse_writes", "Writes to event streams", registry=self.registry)
        self.feed_messages = Counter("tether_feed_messages", "Live messages taken", registry=self.registry)
        self.feed_filled = Counter(
            "tether_feed_filled", "Messages read from the log because no live copy came", registry=self.registry
        )
        self.feed_resets = Counter("tether_feed_resets", "Times the log was found changed", registry=self.registry)
        self.feed_refused = Counter(
            "tether_feed_refused",
            "Messages that were not handed out: their conversation lives in another workspace, or nobody admitted it",
            registry=self.registry,
        )
        self.batches = Counter("tether_projection_batches", "Committed batches", registry=self.registry)
        self.projected = Counter("tether_projection_messages", "Projected messages", registry=self.registry)
        self.holes = Counter("tether_projection_holes", "Holes filled from the log", registry=self.registry)
        self.lost = Counter("tether_projection_gaps", "Gaps recorded", registry=self.registry)
        self.unreadable = Counter("tether_projection_unreadable", "Undecodable messages", registry=self.registry)
        self.refused = Counter(
            "tether_projection_refused",
            "Messages of the log that were not believed, by reason (see quarantine)",
            ["reason"],
            registry=self.registry,
        )
        self.untold = Counter(
            "tether_quarantine_failed", "Refused messages that quarantine could not take", registry=self.registry
        )
        self.binds = Counter(
            "tether_projection_binds",
            "Times a projection began: fast (what was applied is proven), else why it began anew: first, "
            "database_older, consumer_gone, position_changed, evicted",
            ["outcome"],
            registry=self.registry,
        )
        self.recoveries = Counter(
            "tether_recovery_attempts",
            "Attempts to repair rows: repaired, current (nothing was wrong), behind, told (the log has the note), else "
            "why nobody had a snapshot: not_whole, no_collector, capability_missing, no_answer, refused, "
            "nothing_logged, or failed, timed_out",
            ["outcome"],
            registry=self.registry,
        )
        self.recovery_candidates = Gauge(
            "tether_recovery_candidates",
            "Executions whose rows wait to be repaired: watched (a reader follows), cold",
            ["state"],
            registry=self.registry,
        )
        self.lag = Gauge(
            "tether_projection_pending_messages",
            "Messages that wait for their rows",
            ["tenant"],
            registry=self.registry,
        )

        self.webhooks = Counter(
            "tether_webhook_attempts",
            "Attempts to deliver a notification, by what became of it",
            ["outcome"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        return process_metrics.render(self.registry)
