"""Whole checkpoints, for commands and callbacks: verify, consolidate, copy, find and look after them.

It may use everything else here.
"""
