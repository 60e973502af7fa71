"""Tests of this node: before it gets ranks, when it is suspected, and of its network."""
