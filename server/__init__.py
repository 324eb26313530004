"""The gRPC front end: the wire, the queue, the worker thread and the `zen` command."""
