"""What a service says of itself: logs, metrics and traces."""
