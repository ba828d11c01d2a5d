if __name__ != "tpu_dist.runtime":
    raise ImportError("import tpu_dist.runtime, not its folder")
