"""``python -m visionattn``: the command ``visionattn`` where its script is not on the path."""

from visionattn.command import script

if __name__ == "__main__":
    script()
