"""gRPC: servers and channels with the limits, checks and traces that all services have."""
