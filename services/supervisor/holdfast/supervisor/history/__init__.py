"""Remembering: the history of events and steps, and the goodput that follows from it."""
