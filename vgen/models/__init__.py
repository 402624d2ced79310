"""Native model parts: plain modules that import torch only."""
