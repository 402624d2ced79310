"""Tiny models of our own: the small world that they are trained on, and how their videos are judged."""
