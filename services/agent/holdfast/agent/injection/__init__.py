"""Faults that are injected into this node for a test."""
