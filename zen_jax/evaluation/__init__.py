"""A base, its fine-tune and what one bit makes of it, held against one another: `zen eval`."""
