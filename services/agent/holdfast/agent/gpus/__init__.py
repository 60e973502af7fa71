"""The GPUs of this node: which there are, their state, and their reset."""
