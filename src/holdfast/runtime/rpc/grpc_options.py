"""Options of both sides of every gRPC connection: message size, and detection of silent peers."""

from __future__ import annotations

# Enforced by the receiver, with RESOURCE_EXHAUSTED. An inventory of thousands of shards is about 1 MiB.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024

# The kernel closes the sockets of a killed process, which is detected immediately. Pings detect peers that are lost without
# this (power, network) after at most PING_INTERVAL + PING_TIMEOUT. Threads of the gRPC core answer them, so a busy interpreter
# is not taken for a dead one.
PING_INTERVAL_MS = 2_000
PING_TIMEOUT_MS = 4_000

COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # Required: without this option, the timeout of a ping is a minute (seen with 1.85), despite the option above.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0 = no limit
)
