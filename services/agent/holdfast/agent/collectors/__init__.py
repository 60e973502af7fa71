"""The collectors of an agent, listed in `registry`. This file imports nothing: the reader processes, which stay on every node
with GPUs, import a module of this package and need none of the others."""
