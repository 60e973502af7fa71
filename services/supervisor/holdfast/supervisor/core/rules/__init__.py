"""Rules that need no state of the supervisor: each is a function of a few values.

planner.py     assigns ranks to nodes for the next generation
election.py    selects the saved step that is restored, by the rule of `holdfast.restore`
interval.py    how often a job saves
offenders.py   which nodes fail repeatedly      holddown.py  when a node returns after a fault
links.py       what network tests say about each node
step_times.py  what a warning costs, by step times before and after it
wording.py     lists and times in messages
"""
