"""tpu_dist: PyTorch's distributed training on TPU pods, over XLA collectives."""

from tpu_dist import _autoload

# The one effect of this import, for those who turn torch's autoload off.
_autoload.register()
