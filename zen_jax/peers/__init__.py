"""Our engine beside other programs that run the same weights, each in a process of its own."""
