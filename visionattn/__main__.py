"""Run the command ``visionattn`` as ``python -m visionattn``, if the script is not on PATH."""

from visionattn.command import script

if __name__ == "__main__":
    script()
