"""What the `zen` command does, a module for each group of commands; `server.cli` declares them."""
