"""Asking policies: which questions go out when, and the process that a user's script runs in."""
