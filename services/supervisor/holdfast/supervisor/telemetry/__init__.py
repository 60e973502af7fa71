"""What operators see of the leader from outside: log lines, metrics, traces."""
