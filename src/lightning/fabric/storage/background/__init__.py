"""Saves beside training: a copy of the state in host memory, and queues of saves that other threads carry out.

It may use ``sharded``, ``archives`` and what is below these.
"""
