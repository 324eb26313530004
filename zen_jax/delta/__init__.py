"""1-bit deltas: what one is, how it is made, how it is applied and how many lie side by side."""
