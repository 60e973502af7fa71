"""The `holdfast` command and the local stack: everything that a person types."""
