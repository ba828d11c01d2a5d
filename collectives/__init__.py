"""From a c10d verb on a group of devices to an XLA program, and its running."""

if __name__ != "tpu_dist.collectives":
    raise ImportError("import tpu_dist.collectives, not its folder")
