"""Markers that skip without their hardware, and the environment every test runs in."""

import os

import pytest

# Tests are many small sums, which a second thread slows down; it is also what a CPU rank uses.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {"gpu": 1, "multigpu": 2}
    marked = [(item, needs[mark]) for item in items for mark in needs if item.get_closest_marker(mark)]
    if not marked:
        return
    import torch

    available = torch.cuda.device_count()
    if available and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        # NCCL 2.30 and later let ranks share a GPU, which is slow and otherwise the same.
        available = max(available, 2)
    for item, wanted in marked:
        if available < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), this machine has {available}"))
