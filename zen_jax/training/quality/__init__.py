"""What one bit costs: plain, distilled and ours beside other methods, at chosen bytes."""
