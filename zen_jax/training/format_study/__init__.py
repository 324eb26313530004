"""What each format of a delta costs in bytes and in quality: the measurements of docs/format.md."""
