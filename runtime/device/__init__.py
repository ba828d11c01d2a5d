"""`torch.device("tpu")`: tensors whose storage holds an array of this process's PJRT device."""
