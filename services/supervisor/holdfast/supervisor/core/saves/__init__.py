"""Saved steps of jobs.

saved.py          which are known, and where their shards are
earlier.py        those of earlier submissions of a name, and the one that a new submission continues from
ordered_saves.py  saves on which all ranks agree first
pacing.py         how often a running job saves
reports.py        which tiers a checkpoint has reached
retention.py      the newest step that every node must keep
pruning.py        steps that an operator deletes
catalogue.py      steps as the API lists them
"""
