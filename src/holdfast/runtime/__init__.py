"""What every service's main() needs: settings, the run loop, gRPC ends, children, logs, traces."""
