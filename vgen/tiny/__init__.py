"""A tiny LTX-2 of our own: the small world that it is trained on, and how its videos are judged."""
