"""Child processes: their start, their user, their output and their end."""
