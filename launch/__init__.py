"""`tpu-launch`: starts, watches and ends the workers of a run, on torch.distributed.elastic."""

if __name__ != "tpu_dist.launch":
    raise ImportError("import tpu_dist.launch, not its folder")
