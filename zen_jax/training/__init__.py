"""Training: a loop, the tasks and texts, and the recipe of the demo family."""
