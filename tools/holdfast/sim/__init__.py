"""The real supervisor core, planner, election and policies against a seeded hostile world, in virtual time."""
