"""The control sessions with agents: what they may say, what goes to them, what they have not answered."""
