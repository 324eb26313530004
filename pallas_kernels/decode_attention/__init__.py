"""What a decode step does between its products: RMSNorm, and one token's attention to its cache."""
