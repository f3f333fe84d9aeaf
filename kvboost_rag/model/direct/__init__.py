"""Our own checkpoint reader: meta model, one contiguous blob per layer, each byte read once to where it stays."""
