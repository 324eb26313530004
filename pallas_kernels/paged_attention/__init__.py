"""A cache in pages: what it holds, and attention to it where there is no kernel of ours."""
