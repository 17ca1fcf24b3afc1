"""Training, evaluation, predictions and features where Python lacks what Windows lacks."""

import subprocess
import sys
from pathlib import Path

import pytest

OTHER_SYSTEM = """
import os, shutil, signal, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
shutil._use_fd_functions = False
for name in "O_DIRECTORY O_NOFOLLOW killpg posix_fallocate register_at_fork sysconf".split():
    delattr(os, name)
del signal.SIGKILL

def of_package():
    return sys._getframe(2).f_globals["__name__"].startswith("visionattn")

def refused(path):
    raise PermissionError(13, "used by another process", str(path))

def opened(path, *options, real=os.open, **more):
    return refused(path) if of_package() and os.path.isdir(path) else real(path, *options, **more)

def renamed(real):
    def rename(*paths):
        for number in os.listdir("/proc/self/fd") if of_package() else ():
            held = os.path.realpath("/proc/self/fd/" + number)
            if any((held + "/").startswith(os.path.realpath(path) + "/") for path in paths):
                refused(held)
        return real(*paths)
    return rename

os.open, os.rename, os.replace = opened, renamed(os.rename), renamed(os.replace)
from visionattn.command import main
"""
RUN = """
run, small = ["--output=runs", "--run=a"], ["--optim.warmup_epochs=0", "--data.workers=0"]
small += ['--model.args={"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 16}']
best = ["--checkpoint", "runs/a/best.safetensors"]
for words in (
    ["train", "--config", "digits", "--epochs=1", *run, *small],
    ["train", "--config", "runs/a/config.yaml", "--resume", "--epochs=2"],
    ["validate", *best],
    ["predict", *best, "--images", "image.png", "--output", "classes.csv"],
    ["features", *best, "--images", "image.png", "--output", "features"],
    ["features", *best, "--images", "image.png", "--output", "features", "--overwrite"],
    ["features", *best, "--images=image.png", "--img-size=native", "--dense", "--output=map.npy"],
):
    assert main(words) == 0, words
"""


@pytest.mark.slow
def test_digits_are_trained_and_used_where_the_system_is_not_posix(tmp_path, started_quickly):
    from PIL import Image

    Image.linear_gradient("L").resize((32, 32)).save(tmp_path / "image.png")
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r})" + OTHER_SYSTEM + RUN
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "map.npy").exists() and (tmp_path / "features" / "index.csv").exists()
