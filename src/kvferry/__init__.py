"""Moves KV caches between inference engines and memory tiers, exactly and in few descriptors."""

__version__ = "0.1.0"
