"""Will it fit, and how fast could it be: bytes, operations and times of a family on some cards."""
