"""One readable function per model, from a request to its frames and sound."""
