"""Every number, with its unit in its name and its reason beside it. Operators' settings default to these."""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# --- of the product's specification: each has a test ---
ADMISSION_WAIT_S: Final = 5.0  # bounds a caller's wait for the conversation's gate, not the prompt
DISCOVERY_SANDBOXES_MAX: Final = 4  # takeover without a resolvable target asks at most so many sandboxes
DISCOVERY_WAIT_S: Final = 6.0
STOP_REPLY_S: Final = 2.0  # a router's wait for the reply to a stop; then it looks into the log and asks the receipt
STOP_ANSWER_S: Final = 40.0  # a stop that nobody answers for: beyond ACK_WAIT_S, so a second router has its turn
STOP_PROOF_S: Final = 60.0  # a stop that was taken without proof of the end: several times the whole escalation
RECOVERY_WAIT_S: Final = 20.0  # a collector that has not caught up with an execution by then: `auto` takes over
ATTACH_QUICK_ATTEMPTS: Final = 8
RECONCILE_INTERVAL_S: Final = 30.0
RECONCILE_INTERVAL_MAX_S: Final = 60.0
DISCOVERY_ENTRIES_MAX: Final = 256
DISCOVERY_BYTES_MAX: Final = 256 * KIB
DISCOVERY_RESERVED_BYTES: Final = 32 * KIB  # of the above, kept for the registration's own fields
TERMINAL_RETENTION_S: Final = 24 * 3600.0
TERMINAL_DISK_GRACE_S: Final = 300.0
SNAPSHOT_MEMORY_BYTES_MAX: Final = 256 * MIB
SNAPSHOT_DISK_BYTES_MAX: Final = 256 * MIB
RECOVERY_ENTRIES_MAX: Final = 1024
HISTORY_ROWS_MAX: Final = 200
HISTORY_BYTES_MAX: Final = 128 * KIB
RECOVERY_MATERIAL_BYTES_MAX: Final = 64 * MIB
RECOVERY_MATERIAL_FILES_MAX: Final = 64
RECOVERY_MATERIAL_CONCURRENCY: Final = 2
COLD_CANDIDATE_S: Final = 20.0
COLD_CANDIDATES_CONCURRENCY: Final = 4
FINAL_SNAPSHOT_BATCH_S: Final = 30.0
SHUTDOWN_BUDGET_S: Final = 10.0

# --- leases and registrations ---
CONTROL_LEASE_TTL_S: Final = 15  # whole seconds: the server refuses fractions
CONTROL_LEASE_RENEW_S: Final = 5.0
CONTROL_LEASE_IDLE_S: Final = 2.0  # kept so long after its last use: below ADMISSION_WAIT_S, so another's turn comes
REGISTRATION_TTL_S: Final = 30
REGISTRATION_RENEW_S: Final = 10.0
CONTROL_REPLY_S: Final = 10.0  # then the answer reads `unknown`

# --- the log ---
FRAME_BYTES_MAX: Final = 256 * KIB
FRAME_EVENTS_MAX: Final = 512
FRAME_STORED_BYTES_MAX: Final = 512 * KIB  # of what is believed: one event alone may exceed FRAME_BYTES_MAX
NOTE_BYTES_MAX: Final = 1 * MIB  # of a conversation-level event: a prompt's content is in one
MERGED_ORDINALS_MAX: Final = 65_536  # that one merged delta covers
NUMBER_MAX: Final = 2**53  # of ordinals and generations: what JSON's numbers hold exactly
CLOCK_AHEAD_MAX_S: Final = 24 * 3600  # of an event's time before the server's and the reader's clocks
ITEM_ID_CHARS_MAX: Final = 1024  # of a segment's, tool's or interaction's id
TYPE_CHARS_MAX: Final = 64  # of an event's type
# What the fold of one execution keeps, whatever its sandbox writes; what is beyond is told once (`gap{limit}`).
EXECUTION_ITEMS_MAX: Final = 100_000
EXECUTION_CHARS_MAX: Final = 64 * MIB  # of all its items together
ITEM_CHARS_MAX: Final = 4 * MIB  # of one text or progress that grows: its row is written anew as it does
INTERACTIONS_OPEN_MAX: Final = 1_024  # that wait for a human at once
TURNS_MAX: Final = 10_000  # whose usage is kept
RECEIPTS_MAX: Final = 2_000
BACKGROUND_MAX: Final = 256  # works of an agent that outlive their turn
EVENT_BODY_BYTES_MAX: Final = 64 * KIB  # larger goes to the blob store
EVENT_PREVIEW_BYTES: Final = 8 * KIB
BLOB_CHUNK_BYTES: Final = 128 * KIB
PUBLISH_ATTEMPT_S: Final = 0.5
PUBLISH_BACKOFF_MIN_S: Final = 0.02
PUBLISH_BACKOFF_MAX_S: Final = 0.05
DISCONNECTED_AFTER_S: Final = 30.0  # then the sandbox reports `disconnected`, and spools on
SILENCE_PROBE_S: Final = 2.0
READ_BATCH_MAX: Final = 500  # messages of one batch direct get
LIVE_BUFFER_BYTES_MAX: Final = 32 * MIB  # a service's buffer of one live subscription
EVENTS_MAX_AGE_S: Final = 7 * 24 * 3600
EVENTS_MAX_BYTES: Final = 1024 * MIB  # reserved per tenant by JetStream
DUPLICATE_WINDOW_S: Final = 120
QUARANTINE_MAX_BYTES: Final = 16 * MIB  # reserved per tenant; the oldest go first
QUARANTINE_MAX_AGE_S: Final = EVENTS_MAX_AGE_S  # as long as the log has the message itself
QUARANTINE_ENTRY_BYTES_MAX: Final = 16 * KIB
QUARANTINE_PREFIX_BYTES: Final = 1 * KIB  # of a refused message, that its entry shows
QUARANTINE_SINGLE_MAX: Final = 8  # messages of one workspace, reason and batch with entries of their own
QUARANTINE_PAGE_MAX: Final = 200
EXECUTION_TOKEN_CONVERSATION: Final = "_"  # the execution token of conversation-level events

# --- webhooks ---
NOTIFICATION_MEMORY_S: Final = EVENTS_MAX_AGE_S + 24 * 3600  # longer than the log can bring the event again
WEBHOOK_TIMEOUT_S: Final = 10.0  # of one delivery, from connect to answer
WEBHOOK_BACKOFF_S: Final = (1, 5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800)  # about 16 h, then dead
WEBHOOK_RETRY_AFTER_MAX_S: Final = 3600.0  # of what a receiver asks for
WEBHOOK_CONCURRENCY: Final = 8  # deliveries at once, per endpoint
WEBHOOK_DETAIL_CHARS_MAX: Final = 1024  # of a text that a notification carries

# --- edge ---
CONNECTION_RETRY_MAX_S: Final = 2.0  # between attempts of a client whose server cannot be reached
SSE_HEARTBEAT_S: Final = 10.0
SSE_BUFFER_BYTES_MAX: Final = 1 * MIB
SSE_RETRY_MS: Final = (500, 1500)  # a browser's wait before it connects again: drawn for each connection
WS_MESSAGE_BYTES_MAX: Final = 1 * MIB  # of a client: what the body of a request may have
WS_ASKS_MAX: Final = 8  # of one connection that are under way; one more is refused
WS_PING_S: Final = 20.0
WS_PONG_S: Final = 30.0  # without an answer to a ping for so long, the peer is gone
TICKET_LIFE_S: Final = 60.0  # to open a stream with it; the open stream is not bounded by it
PROMPT_BYTES_MAX: Final = 512 * KIB  # a message at the 1 MiB bus limit closes the connection once headers are added
WAITING_PROMPTS_MAX: Final = 64
HTTP_BODY_BYTES_MAX: Final = 1 * MIB
JSON_DEPTH_MAX: Final = 64
CONTROL_PAYLOAD_BYTES_MAX: Final = 512 * KIB

# --- work queues ---
NAK_DELAY_MIN_S: Final = 0.25
NAK_DELAY_MAX_S: Final = 5.0
ACK_WAIT_S: Final = 30.0
PROMPT_ACK_WAIT_S: Final = 2.0  # a killed router's prompts are its successor's after so long
COMMAND_ACK_WAIT_S: Final = 6.0  # what was sent into a connection that had gone silent comes again after so long
REQUEST_MEMORY_S: Final = 24 * 3600

# --- sandboxes and processes ---
SPOOL_BYTES_MAX: Final = 256 * MIB
SPOOL_SEGMENT_BYTES: Final = 8 * MIB
LINE_BYTES_MAX: Final = 16 * MIB  # a longer output line is cut, and says so
STOP_INTERRUPT_S: Final = 2.0  # interrupt → stdin closed
STOP_TERM_S: Final = 5.0  # SIGTERM → SIGKILL
WATCHDOG_AFTER_TERMINAL_S: Final = 10.0
FIRST_EVENT_S: Final = 30.0
DRAIN_GRACE_S: Final = 60.0
DRAIN_DEADLINE_S: Final = 120.0
DRAIN_TURN_SHARE: Final = 0.5
DRAIN_GRACE_MAX_S: Final = 3600.0  # a drain that is asked to wait longer is refused
CHECKPOINT_FILES_MAX: Final = 50_000
CHECKPOINT_BYTES_MAX: Final = 2048 * MIB  # of all files; more fails by name, nothing is left out in silence
CHECKPOINT_MANIFEST_BYTES_MAX: Final = 32 * MIB
OWNER_SWEEP_S: Final = 60.0
VOLUME_WAIT_S: Final = 600.0
SANDBOX_CREDENTIALS_S: Final = 3600.0  # a sandbox's credentials on NATS; renewed at half of it
