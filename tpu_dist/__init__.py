"""tpu_dist: PyTorch's distributed training on TPU pods, over XLA collectives."""
