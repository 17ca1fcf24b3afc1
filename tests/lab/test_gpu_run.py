"""``make gpu`` without a GPU: phases that end in any way, what is written as it comes, the last
lines.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.tools import words
from visionattn.cli.files import add_line, read_lines
from visionattn.lab.gpu import run as gpu_run
from visionattn.lab.gpu import summary as gpu_summary
from visionattn.lab.gpu.run import Phase, Run, phases, run_all, run_phase, with_minutes
from visionattn.lab.gpu.summary import summary, table_lines, tests_lines

ROOT = Path(__file__).parents[2]
tests_lines.__test__ = False  # the name is not that of a test


@pytest.fixture
def run(tmp_path):
    lines = []
    run = Run(tmp_path, lines.append)
    run.lines = lines
    yield run
    run.log.close()


def python(code, *more):
    return (sys.executable, "-u", "-c", code, *more)


def test_a_phase_runs_its_processes_side_by_side_and_keeps_what_they_say(run):
    meet = "import sys, time; print('in', flush=True); open(sys.argv[1], 'w').close()\n"
    meet += "while not __import__('os').path.exists(sys.argv[2]): time.sleep(0.01)\nprint('out')"
    places = [str(run.out / name) for name in "ab"]
    commands = (python(meet, *places), python(meet, *reversed(places)))  # each waits for the other
    ended = run_phase(Phase("both", commands, 60), run, dict(os.environ))
    assert ended.ok and ended.codes == (0, 0)
    log = (run.out / "log.txt").read_text().splitlines()
    assert log == "\n".join(run.lines).splitlines()
    assert {"[0] in", "[0] out", "[1] in", "[1] out"} <= set(log)


@pytest.fixture
def limit_at(monkeypatch):
    """The limit of a phase is reached as soon as a file is there, however busy the machine is."""

    def at(path):
        wait, first = gpu_run._wait, [True]

        def until(processes, seconds):
            if not first:
                return wait(processes, seconds)
            first.clear()
            deadline = time.monotonic() + 120
            while (
                not (path.exists() and path.read_text().endswith("."))
                and time.monotonic() < deadline
            ):
                time.sleep(0.02)
            return False

        monkeypatch.setattr(gpu_run, "_wait", until)

    return at


def test_a_phase_is_ended_at_its_limit_with_all_that_it_started(run, limit_at):
    child = run.out / "child"
    limit_at(child)
    code = (
        "import subprocess, sys, time\np = subprocess.Popen(['sleep', '600'])\nprint('begun', "
        "flush=True)\n"
    )
    code += "open(sys.argv[1], 'w').write(f'{p.pid}.')\ntime.sleep(600)"
    ended = run_phase(Phase("slow", (python(code, str(child)),), 60), run, dict(os.environ))
    assert ended.late and not ended.ok and "slow: ended at its limit" in str(ended)
    assert "begun" in run.lines
    deadline, pid = time.monotonic() + 60, child.read_text().rstrip(".")
    while Path(f"/proc/{pid}").exists() and not is_zombie(pid):
        assert time.monotonic() < deadline, "a process of the phase is left"
        time.sleep(0.05)


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_process_that_does_not_listen_is_killed(run, monkeypatch, limit_at):
    monkeypatch.setattr(gpu_run, "GRACE", 0.5)
    limit_at(run.out / "deaf")
    deaf = "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    deaf += "open(sys.argv[1], 'w').write('.')\ntime.sleep(600)"
    ended = run_phase(
        Phase("deaf", (python(deaf, str(run.out / "deaf")),), 60), run, dict(os.environ)
    )
    assert ended.late and ended.codes == (-signal.SIGKILL,)


def test_what_follows_a_needed_phase_that_fails_is_not_begun_and_one_line_says_so(run):
    bad, good = python("print('no kernel'); raise SystemExit(3)"), python("print('table')")
    todo = [Phase("first kernel", (bad,), 60, needed=True), Phase("table", (good,), 60)]
    ended = run_all(todo, run, dict(os.environ))
    assert [one.codes for one in ended] == [(3,)] and "table" not in run.lines
    assert run.lines[-1] == "error: first kernel failed, so nothing else was begun"
    todo = [Phase("tests", (bad,), 60), Phase("table", (good,), 60)]
    assert [one.codes for one in run_all(todo, run, dict(os.environ))] == [(3,), (0,)]


def test_the_phases_fit_into_ten_minutes_and_tests_survive_plugins_and_warnings_of_others(tmp_path):
    todo = phases(tmp_path, tmp_path / "claims", 16, gpu_run.SECONDS)
    assert [phase.name for phase in todo] == ["first kernel", "compile ahead", "tests", "table"]
    assert [phase.needed for phase in todo] == [True, False, False, False]
    limits = [phase.until for phase in todo]
    assert limits == sorted(limits)
    assert limits[-1] + gpu_run.GRACE + gpu_run.KILLED + gpu_run.SUMMARY <= gpu_run.SECONDS < 600
    _, compiling, testing, _ = todo
    assert dict(compiling.variables) == {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    assert not testing.variables
    assert len(compiling.commands) == 16 and len(testing.commands) == 8
    for command in testing.commands + compiling.commands:
        text = " ".join(command)
        assert "-p no:benchmark" in text and "-W default" in text
        assert "-m gpu tests/kernels/test_" in text
    shares = {
        word for command in testing.commands for word in command if word.startswith("--share")
    }
    assert shares == {f"--share={i}/8" for i in range(8)}
    assert gpu_run.environment_of(False)["OMP_NUM_THREADS"] == "2"


def test_the_table_gets_the_minutes_that_are_left(tmp_path):
    table = phases(tmp_path, tmp_path, 1, 560)[-1]
    assert table.commands[0][-1] == "--minutes"
    given = with_minutes(table, now=305.0)
    assert given.commands[0][-2:] == ("--minutes", "3.25") and given.until == table.until == 540
    assert with_minutes(table, now=600.0).commands[0][-1] == "0.00"


def test_a_folder_with_rows_of_an_earlier_run_is_left_alone(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("{}")
    assert gpu_run.main([str(tmp_path)]) == 2
    assert "has rows.jsonl of an earlier run; take another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_rows_of_a_process_that_is_killed_are_kept(tmp_path, started_quickly):
    path = tmp_path / "rows.jsonl"
    code = "import os, signal, sys\nfrom visionattn.cli.files import add_line\n"
    code += (
        "for i in range(3): add_line(sys.argv[1], {'i': i})\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert read_lines(path) == [{"i": 0}, {"i": 1}, {"i": 2}]
    with path.open("a") as file:
        file.write('{"i": 3, "name": "ha')
    assert len(read_lines(path)) == 3 and read_lines(tmp_path / "none") == []


def test_lines_say_what_passed_what_failed_and_what_was_not_reached():
    def test(name, outcome, message=None):
        return dict(
            kind="test", name=f"tests/{name}", outcome=outcome, seconds=1.0, message=message
        )

    dealt = [dict(kind="dealt", share=i, tests=2) for i in range(2)]
    lines, good = tests_lines([*dealt, *(test(name, "passed") for name in "abcd")])
    assert (lines, good) == (["tests: 4 in all: 4 passed"], True)
    lines, good = tests_lines(
        [*dealt, test("a", "failed", "too far"), test("a", "passed"), test("b", "skipped")]
    )
    assert lines == [
        "tests: 4 in all: 1 failed, 1 skipped, 2 not reached, so not checked",
        "FAILED a: too far",
    ]
    assert not good
    assert tests_lines([]) == (["tests: 0 in all: none ran"], False)
    skipped = [dict(kind="dealt", share=0, tests=1), test("a", "skipped")]
    assert tests_lines(skipped)[1] is False  # where all are skipped nothing was checked


def row(what="kernelized forward", reached="yes", **more):
    found = dict(kind="row", what=what, size="N", status="ok", seconds_median=1e-3, of_floor=0.5)
    return found | dict(reach=">= 1 x", shown="2 x", reached=reached) | more


def eager_row(ratio, status="ok"):
    found = dict(kind="row", what="kernel against eager", operation="kernelized", dtype="bfloat16")
    return found | {"tokens": 196, "width": 16, "pass": "forward", "ratio": ratio, "status": status}


def test_the_table_in_short_says_what_is_reached_missed_and_wrong():
    late = row("late", "not measured: 5 minutes were over", status="not measured", shown=None)
    lines, good = table_lines([row(expected="3 x"), row("slow", "no"), late])
    assert (
        lines[0]
        == "REACHED: kernelized forward, N: 1 ms (50 % of the floor); 2 x of >= 1 x, expected 3 x"
    )
    assert lines[1].startswith("MISSED: slow")
    assert lines[2] == "not measured: 5 minutes were over: late, N: >= 1 x"
    assert lines[-1] == "table: 3 figures, 1 reached, 1 missed" and good
    assert table_lines([row(status="wrong: error")])[1] is False and table_lines([])[1] is False
    lines, good = table_lines([eager_row(2.0), eager_row(0.5), eager_row(None, "failed: x")])
    assert lines[1] == "kernel against eager: 2 of 3 rows timed, eager faster in 1" and not good
    assert lines[2:] == [
        f"  kernelized bfloat16 N = 196 d = 16 forward: {end}"
        for end in ("failed: x", "0.5 x eager")
    ]


def test_the_summary_is_short_enough_to_be_seen_whole(tmp_path):
    add_line(tmp_path / "rows.jsonl", {"kind": "provenance", "gpu": "NVIDIA H100", "torch": "2.11"})
    for i in range(80):
        add_line(tmp_path / "rows.jsonl", row("what " * 80, "no"))
        failed = dict(kind="test", name=str(i), outcome="failed", seconds=1, message="x" * 500)
        add_line(tmp_path / "tests.jsonl", failed)
    lines, good = summary(tmp_path, ["first kernel: done"])
    assert len(lines) == gpu_summary.MOST_LINES and not good
    assert sum(len(line) + 1 for line in lines) < 12_000
    assert lines[1] == "gpu NVIDIA H100, torch 2.11" and "more lines: see rows.jsonl" in lines[-2]
    assert lines[-1].endswith("rows.jsonl, tests.jsonl")


def test_tests_are_dealt_out_among_processes_and_written_down_one_by_one(tmp_path, started_quickly):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('i', range(5))\n"
        "def test_of(i):\n    assert i != 3, 'three\\nis wrong'\n"
    )
    results = tmp_path / "tests.jsonl"
    for share in range(2):
        command = words(
            "{} -m pytest -q -p visionattn.lab.gpu.dealt_tests -p no:cacheprovider", sys.executable
        )
        command += [f"--share={share}/2", f"--results={results}", "-c", os.devnull, str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    found = read_lines(results)
    assert [record["tests"] for record in found if record["kind"] == "dealt"] == [3, 2]
    outcomes = {
        record["name"][-2]: record["outcome"] for record in found if record["kind"] == "test"
    }
    assert outcomes == {"0": "passed", "1": "passed", "2": "passed", "3": "failed", "4": "passed"}
    (message,) = (record["message"] for record in found if record.get("outcome") == "failed")
    assert message.startswith("AssertionError: three is wrong")


BLOCKED = tuple(words("albumentations cv2 jsonargparse rich xdist tensorboard sklearn matplotlib"))
BLOCKER = f"""
import sys
from importlib.machinery import PathFinder
class Blocked(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        blocked = name.partition(".")[0] in {BLOCKED!r}
        return None if blocked else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Blocked
"""
"""As where these packages are not installed."""
FEW = (
    "kernelized forward d = 64|vit_s inference / timm.* 1024 px|eager kernelized efficient "
    ".* float16"
)


def test_a_rehearsal_runs_where_little_is_installed_and_writes_everything(tmp_path):
    """All phases, with few rows; ``make gpu-rehearsal`` runs all."""
    pytest.importorskip("triton", reason="GPU kernels need Triton")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCKER)
    out = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}
    command = words(
        "{} -m visionattn.lab.gpu.run {} --rehearse --only {}", sys.executable, out, FEW
    )
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert done.stdout.startswith("python ") and "torch " in done.stdout.splitlines()[0]
    assert sorted(path.name for path in out.iterdir()) == words(
        "log.txt rows.jsonl summary.txt tests.jsonl"
    )
    records = read_lines(out / "rows.jsonl")
    found = [record["what"].split(" /")[0] for record in records if record["kind"] == "row"]
    assert found == ["kernelized forward", "scaleformer_vit_s inference", "kernel against eager"]
    lines = (out / "summary.txt").read_text().splitlines()
    assert done.stdout.splitlines()[-len(lines) :] == lines
    assert [line.split(":")[0] for line in lines[2:7]] == [
        "first kernel",
        "compile ahead",
        "tests",
        "table",
        "tune",
    ]
    assert json.loads((out / "rows.jsonl").read_text().splitlines()[0])["kind"] == "provenance"


def test_a_rehearsal_fails_where_a_row_fails(started_quickly):
    code = "import sys\nfrom visionattn.lab.gpu import table as gpu\nsys.argv = ['benchmark.py']\n"
    code += (
        "def measure(figure, bench): raise ValueError('planted')\ngpu.measure_operation = measure\n"
    )
    code += "sys.path.insert(0, 'tools')\nimport benchmark\n"
    code += "sys.exit(benchmark.main(['gpu', '--rehearse', '--only', 'kernelized forward d']))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0 and "1 rows are wrong or failed" in done.stderr
    assert "failed: ValueError: planted" in done.stdout
