"""The leader's log lines, metrics and traces."""
