"""Runs planned moves beside the engine: one transfer thread, whose jobs submit transfers and poll them."""
