if __name__ != "tpu_dist.collectives":
    raise ImportError("import tpu_dist.collectives, not its folder")
