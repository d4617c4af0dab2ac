"""What the FSDP and model-parallel strategies do to save and to load, for Fabric and the Trainer alike.

It may use everything here but ``tools``.
"""
