"""What a TPU slice is, and how it is found: pure, without torch and without jax."""

if __name__ != "tpu_dist.topology":
    raise ImportError("import tpu_dist.topology, not its folder")
