"""Transforms that spread a model's work; the models know nothing of them."""
