"""The names of all streams."""

FINDINGS = "findings"  # diagnostics → supervisor: domain.findings.Finding
STEPS = "steps"  # diagnostics → supervisor: batches of domain.findings.StepRecord, for goodput and progress
INBOX = "inbox"  # supervisor shell → supervisor core: agents' reports, operators' requests
EVENTS = "events"  # supervisor core → history, SSE: changes, as domain values

# Streams that only groups read: an entry that every group has acknowledged is removed.
CONSUMED = frozenset({FINDINGS, INBOX})

SUPERVISOR_GROUP = "supervisor"
SUPERVISOR_STREAMS = (FINDINGS, STEPS, INBOX)  # that the leader reads
ALERTS_GROUP = "alerts"  # of the supervisors, on EVENTS
LEADER_LEASE = "supervisor"
