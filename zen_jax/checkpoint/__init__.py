"""Reading checkpoints of others, and the store of this project's own."""
