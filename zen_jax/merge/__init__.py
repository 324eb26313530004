"""Merging: several fine-tunes of one base, or one of them cleaned, into one model."""
