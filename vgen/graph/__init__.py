"""CUDA graph capture and torch.compile, applied to a transformer from outside."""
