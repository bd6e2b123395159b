"""One thread: the tensors here are tiny, and threads that wait for a busy core cost more than they save."""

import torch

torch.set_num_threads(1)
