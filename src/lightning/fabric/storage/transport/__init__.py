"""Moves the bytes of one file to a store and back: whole or not at all, in bounded memory, with retries.

Files for S3, GCS and Azure go through obstore's engine if it is installed and can be given the options in force; all
else goes through the fsspec client of the store. It knows nothing of checkpoints, of torch's formats or of ranks, and
may use ``paths`` and the report of a save.
"""
