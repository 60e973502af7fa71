"""The streams to the supervisor and to diagnostics: orders that come in, and reports and signals that leave."""
