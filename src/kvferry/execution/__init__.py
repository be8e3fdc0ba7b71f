"""Runs planned moves beside the engine: one thread, submit and poll, guarded by words."""
