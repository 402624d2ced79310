"""What capture and replay refuse."""


class GraphError(RuntimeError):
    """A call that cannot be captured or replayed as things are, or ranks that do not agree about one."""
