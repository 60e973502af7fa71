"""Imports gRPC without the log of its C core, which goes to stderr past `logging`, and is not JSON. What it says of broken
connections is also in the exceptions of the calls. Every service imports this module before any other.

`GRPC_VERBOSITY` is read by the import only, so it is not left in the environment, which workers inherit. A value that is set
stays."""

import os

NAME = "GRPC_VERBOSITY"

is_ours = NAME not in os.environ
os.environ.setdefault(NAME, "NONE")

import grpc  # noqa: E402, F401

if is_ours:
    del os.environ[NAME]
