"""What is observed of a script without its help, and of a rank that hangs or computes wrong values."""
