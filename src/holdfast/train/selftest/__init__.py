"""A node's tests of its devices: correct results (`gemm`) and memory bandwidth (`memory`).

`python -m holdfast.train.selftest` prints the result as JSON; an agent runs the same in a fork of its worker template.
"""
