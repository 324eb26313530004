"""The wire contract of Zen JAX. The code beside the .proto files is generated; never edit it."""
