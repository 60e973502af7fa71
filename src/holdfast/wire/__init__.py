"""Conversions of all values that cross a process boundary: domain values ↔ protobuf and JSON. Only this package and the gRPC
adapters import `v1`.

Encoders trust their input, which Holdfast's own code has built. Decoders trust nothing: an unknown enum value, a missing part
or columns of unequal length raise `MalformedMessage` that names the field. An unknown value never becomes a default.
"""
