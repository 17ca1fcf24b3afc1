"""Run the command ``visionattn`` as ``python -m visionattn``, for when its script is not on the
path.
"""

from visionattn.command import script

if __name__ == "__main__":
    script()
