import torch

# Ranks share two cores, and small tensors gain nothing from more threads.
torch.set_num_threads(1)
