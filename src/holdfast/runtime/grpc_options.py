"""Options of both sides of every gRPC connection: message size, and detection of silent peers."""

from __future__ import annotations

# Enforced by the receiver, who says so with RESOURCE_EXHAUSTED. An inventory of thousands of shards is about 1 MiB.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024

# A killed process closes its sockets and is seen at once. Pings are for peers that vanish without a word (power, network):
# noticed after at most PING_INTERVAL + PING_TIMEOUT. The core's own threads answer them, so a busy interpreter is not
# mistaken for a dead one.
PING_INTERVAL_MS = 2_000
PING_TIMEOUT_MS = 4_000

COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # The one that counts: without it an unanswered ping is waited for a minute (seen with 1.85), whatever the line above says.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0 = no limit
)
