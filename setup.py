"""What pyproject.toml has no word for: ``configs/`` is part of the package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["visionattn*"]), "visionattn.configs"],
    package_dir={"visionattn.configs": "configs"},
)
