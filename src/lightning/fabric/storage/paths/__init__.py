"""Names on this machine and on any file system of fsspec: what they stand for, what is there, and how it is replaced.

It moves no content. It may use fsspec, the clients of stores behind it, and nothing else of this package.
"""
