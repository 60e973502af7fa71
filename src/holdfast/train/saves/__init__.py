"""The state of one rank as a shard, and back."""
