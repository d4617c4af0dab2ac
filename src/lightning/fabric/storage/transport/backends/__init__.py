"""The kinds of stores, each with a writer and a reader for one file.

A backend may use what else ``transport`` has, and is used by ``transport.open`` alone, which chooses it.
"""
