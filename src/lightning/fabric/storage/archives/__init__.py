"""Files of ``torch.save``: written without a copy of the state, read in parallel, and checked before they are loaded.

It may use ``transport``, and for the copy that the ranks of a node share also ``collectives``.
"""
