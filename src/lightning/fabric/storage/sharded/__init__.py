"""The format of torch.distributed.checkpoint: each rank writes and reads its own part, and ``.metadata`` commits it.

What is written can be read by torch alone, and what torch has written is read here. It may use ``archives``,
``collectives`` and what is below these.
"""
