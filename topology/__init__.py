if __name__ != "tpu_dist.topology":
    raise ImportError("import tpu_dist.topology, not its folder")
