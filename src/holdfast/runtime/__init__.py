"""Common parts of every service's main(): settings, the run loop, gRPC, child processes, logs, traces."""
