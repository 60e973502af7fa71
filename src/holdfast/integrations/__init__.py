"""Training frameworks under Holdfast: one module per framework, imported only by who uses it."""
