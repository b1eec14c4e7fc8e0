"""Both sides of ``parallel_step.py``: steps of two ranks as we write them, and as users of PyTorch do."""
