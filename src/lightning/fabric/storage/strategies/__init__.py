"""Saves and loads of the FSDP and model-parallel strategies, for Fabric and the Trainer alike.

The package may use everything here but ``tools``.
"""
