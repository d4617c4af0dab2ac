"""The ranks of a job: gathers and scatters whose errors reach every rank, and that end when a rank is gone.

It may use ``transport`` and what is below that.
"""
