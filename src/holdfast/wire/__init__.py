"""Everything that crosses a process border: domain values ↔ protobuf and JSON. Only here and in gRPC adapters is `v1` known.

Encoders trust their input (it was built by our own code); decoders trust nothing: an unknown enum, a missing part or columns of
unequal length raise `MalformedMessage` naming the field. Unknown never becomes a default.
"""
