"""Whole checkpoints, for commands and callbacks: verify, consolidate, copy and find them.

It may use everything else here.
"""
