"""Training recipes: plain PyTorch programs that any c10d backend can run."""

if __name__ != "tpu_dist.recipes":
    raise ImportError("import tpu_dist.recipes, not its folder")
