"""Where each byte of a KV cache is, as integers. Imports no torch."""
