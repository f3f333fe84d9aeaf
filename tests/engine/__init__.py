"""Laws of the engine: what must hold whatever is reused."""
