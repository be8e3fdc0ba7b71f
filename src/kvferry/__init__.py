"""Moves KV caches between inference engines and memory tiers, exactly and in few pieces."""

__version__ = "0.1.0"
