"""y = x W^T + alpha (x S^T): a product with a base weight and with a variant's packed signs."""
