"""A node's tests of its own devices: does it compute what it should (`gemm`), and how fast is its memory (`memory`)?

`python -m holdfast.train.selftest` prints the answer as JSON; an agent runs the same in a fork of its worker template."""
