"""A prompt's attention: chunks of queries, each to its own row of the cache."""
