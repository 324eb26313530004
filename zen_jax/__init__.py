"""Base model, 1-bit deltas, engine and conversion: everything below the server."""
