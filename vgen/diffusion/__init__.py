"""Tensor maths of sampling: schedules, solver steps, guidance."""
