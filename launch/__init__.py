if __name__ != "tpu_dist.launch":
    raise ImportError("import tpu_dist.launch, not its folder")
