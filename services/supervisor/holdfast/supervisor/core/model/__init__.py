"""The supervisor's state as values, and the turn that changes it.

state.py      all of it; job.py  one job; lifecycle.py  what a job is doing, and the table of causes that change it
index.py      the groups in which nodes, jobs, incidents and orders are found; indexing.py  keeps them up to date
present.py    what is true now, while events are folded
turn.py       the next state, and the commands
"""
