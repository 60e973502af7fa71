"""The machine under the agent: its start, its end, and its limits."""
