"""The warm start: the template process, and the workers that are forked from it."""
