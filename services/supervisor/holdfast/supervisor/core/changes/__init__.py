"""Changes from one generation of a job to the next, in two phases.

change.py        begins a change
handover.py      … from PREPARE to the first steps; presence.py  ranks without a worker
planned.py       changes of a healthy run, after a save
loans.py         replicas lent by jobs of lower priority
suspension.py    jobs all of whose nodes leave
final_upload.py  the last checkpoint of a completed job
"""
