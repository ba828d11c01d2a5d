"""``python -m tpu_dist.launch``: the same as the console script ``tpu-launch``."""

import sys

from tpu_dist.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
