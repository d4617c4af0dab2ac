"""Semantic patches: what this project changes in Lightning's own files, one TOML file per purpose.

``python -m patches --help`` lists the verbs; :mod:`patches.engine` documents the format.
"""
