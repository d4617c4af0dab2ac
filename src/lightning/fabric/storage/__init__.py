"""Everything that touches a store: where checkpoints are, and how their bytes get there and back.

Nothing outside this package opens a remote file or asks a store about one; strategies, plugins, callbacks and loggers
call it. Importing it loads no client library (s3fs, gcsfs, adlfs, ...): fsspec does that when a URL needs one.
"""
