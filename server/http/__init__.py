"""OpenAI's HTTP interface, a thin layer over the same calls as gRPC's."""
