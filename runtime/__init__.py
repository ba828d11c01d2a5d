"""The PJRT client of this process, and its connection to the other processes of the job."""

if __name__ != "tpu_dist.runtime":
    raise ImportError("import tpu_dist.runtime, not its folder")
