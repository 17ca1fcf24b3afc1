"""``python -m visionattn``: the command ``visionattn`` where its script is not on the path."""

import sys

from visionattn.command import main

if __name__ == "__main__":
    sys.exit(main())
