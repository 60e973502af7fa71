"""Incidents, and what a policy sees of them and of their job.

opening.py            creates incidents
views.py              the state as policies, the planner and the API see it
recipes.py            the rungs of a recipe, one after the other
standing_warnings.py  conditions that slow a running job or may end it
"""
