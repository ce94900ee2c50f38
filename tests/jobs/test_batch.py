"""The batch script itself, run by bash with a fake Slurm: one attempt from its first line to its
requeue.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jobs import ledger
from jobs.evidence import states_of
from jobs.hydra_entry import launch_on_slurm
from jobs.records import attempts
from tests.jobs.conftest import FAKES, calls, point, put, put_fake, until
from trainer.base.run_folder import read_json

ROOT = Path(__file__).parents[2]


APPTAINER = f"""
while [ "$1" != env ]; do shift; done
export PYTHONPATH=$APPTAINERENV_PYTHONPATH:{shlex.quote(str(ROOT))}; exec "$@"
"""
"""An image that is this machine."""


class Lab:
    """Submits one sweep to the fake and runs its scripts."""

    def __init__(self, fake: Path, tmp_path: Path) -> None:
        self.fake, self.ledger, self.sweep = (
            fake,
            tmp_path / "ledger.jsonl",
            tmp_path / "a sweep's folder",
        )

    def launch(self, points: Sequence, **options: object) -> int:
        return launch_on_slurm(points, {"ledger": str(self.ledger), **options}, self.sweep)

    @property
    def run(self) -> Path:
        return next(iter(sorted(self.sweep.glob("0*-*"))))

    def start(self, index: int = 0, restarts: int = 0, **env: str) -> subprocess.Popen[bytes]:
        folder = next(iter(self.sweep.glob(".submitit/*")))
        pickle = next(iter(sorted(folder.glob("*_submitted.pkl"))))
        slurm = {
            "SLURM_ARRAY_JOB_ID": pickle.name.split("_")[0],
            "SLURM_ARRAY_TASK_ID": str(index),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "n1",
            "SLURMD_NODENAME": "n1",
            "SLURM_RESTART_COUNT": str(restarts),
            "PYTHONPATH": str(ROOT),
            "PLIMSOLL_WORKER_MODULE": "tests.jobs.standin",
            "STANDIN_STEP_S": "0.001",
        }
        log = (self.fake / "batch.log").open("ab")
        return subprocess.Popen(
            ["bash", str(self.fake / "script0")],
            env={**os.environ, **slurm, **env},
            stdout=log,
            stderr=log,
        )

    def attempt(self, index: int = 0, restarts: int = 0, **env: str) -> int:
        return self.start(index, restarts, **env).wait(timeout=200)


@pytest.fixture
def lab(fake: Path, tmp_path: Path) -> Lab:
    return Lab(fake, tmp_path)


def test_a_job_runs_to_its_end(lab: Lab) -> None:
    assert lab.launch([point(0)]) == 0
    assert lab.attempt() == 0, (lab.fake / "batch.log").read_text()
    (line,) = attempts(lab.run)
    assert (
        line["cause"] == "done"
        and line["step_to"] == 20
        and line["nodes"] == "n1"
        and line["job"] == "100_0"
    )
    log = (lab.run / "logs/attempt_1/rank_0.log").read_text()
    assert "rank 0 of 1 attempt 1" in log and "master 10.0.0.7" in log
    assert calls(lab.fake) == ""
    assert (lab.run.stat().st_mode & 0o777, lab.sweep.stat().st_mode & 0o777) == (0o700, 0o700)


def test_saved_and_queued_again_with_its_array_index(lab: Lab) -> None:
    lab.launch([point(0)])
    process = lab.start(STANDIN_HOLD_AFTER="3")
    _stop_when_at_step(lab.run, 3)
    assert process.wait(timeout=200) == 85
    assert (
        calls(lab.fake) == "scontrol requeue 100_0\n"
    )  # SLURM_JOB_ID would requeue the whole array
    (line,) = attempts(lab.run)
    assert line["cause"] == "signalled" and line["step_to"] == 3
    assert lab.attempt(restarts=1) == 0
    assert [a["cause"] for a in attempts(lab.run)] == ["signalled", "done"]
    assert attempts(lab.run)[1]["step_from"] == line["step_to"]


def _stop_when_at_step(run: Path, step: int) -> None:
    """TERM to the trainer, whose pid the stand-in's log folder does not tell: found by its command
    line under /proc.
    """
    metrics = run / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") >= step)
    mine = [p for p in Path("/proc").iterdir() if p.name.isdigit() and _is_worker(p, run)]
    for process in mine:
        os.kill(int(process.name), signal.SIGUSR2)
        with contextlib.suppress(ProcessLookupError):  # it may have saved and gone by then
            os.kill(int(process.name), signal.SIGUSR2)  # in a container it comes twice


def _is_worker(process: Path, run: Path) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"tests.jobs.standin" in words and str(run).encode() in words


@pytest.mark.parametrize("state", ["SIGNALING", ""])
def test_a_job_that_slurm_has_not_taken_is_queued_again(lab: Lab, state: str) -> None:
    """Its signal is still on the way to some process, or the controller doesn't answer for a
    moment.
    """
    lab.launch([point(0)])
    (lab.fake / "job").write_text(f"JobState={state} Restarts=0 PreemptTime=None" if state else "")
    process = lab.start(STANDIN_HOLD_AFTER="2")
    _stop_when_at_step(lab.run, 2)
    assert process.wait(timeout=200) == 85
    assert (
        attempts(lab.run)[0]["cause"] == "signalled"
        and calls(lab.fake) == "scontrol requeue 100_0\n"
    )


def test_slurm_that_took_the_job_itself_is_not_asked_again(lab: Lab) -> None:
    lab.launch([point(0)])
    (lab.fake / "job").write_text("JobState=COMPLETING Restarts=1 PreemptTime=None")
    process = lab.start(STANDIN_HOLD_AFTER="2")
    _stop_when_at_step(lab.run, 2)
    assert process.wait(timeout=200) == 85
    assert attempts(lab.run)[0]["cause"] == "requeued"
    assert calls(lab.fake) == ""


def test_a_user_error_is_not_queued_again(lab: Lab) -> None:
    lab.launch([point(0, trainer__experiment_name="wrong")])
    assert lab.attempt() == 2
    (line,) = attempts(lab.run)
    assert line["cause"] == "error" and calls(lab.fake) == ""
    assert "name it otherwise" in line["why"]
    assert "name it otherwise" in (lab.run / "logs/attempt_1/rank_0.log").read_text()


@pytest.mark.parametrize("name", ["crash", "exit"])
def test_a_crash_is_queued_again_once_when_it_comes_again(lab: Lab, name: str) -> None:
    lab.launch([point(0, trainer__experiment_name=name)])
    assert lab.attempt() == 1
    assert calls(lab.fake) == "scontrol requeue 100_0\n"
    assert lab.attempt(restarts=1) == 1
    assert calls(lab.fake) == "scontrol requeue 100_0\n"
    assert [line["cause"] for line in attempts(lab.run)] == ["crash", "crash"]
    assert (
        "told to crash" in attempts(lab.run)[0]["why"]
        or "os._exit(0)" in (attempts(lab.run)[0]["why"])
    )


def test_a_segmentation_fault_is_queued_again(lab: Lab) -> None:
    lab.launch([point(0, trainer__experiment_name="segfault")])
    assert lab.attempt() == 139
    assert calls(lab.fake) == "scontrol requeue 100_0\n"
    assert lab.attempt(restarts=1) == 0
    assert [line["cause"] for line in attempts(lab.run)] == ["crash", "done"]
    assert "killed by SIGSEGV" in attempts(lab.run)[0]["why"]


@pytest.mark.parametrize("code", [0, 1, 233])
def test_a_launch_that_failed_is_queued_again_away_from_the_node(
    lab: Lab, tmp_path: Path, code: int
) -> None:
    """srun exits with 0 after it lost a node, too."""
    lab.launch([point(0)])
    srun = (tmp_path / "bin/srun").read_text()
    refusal = f'case "$*" in *_submit*) echo "srun: error: launch failed" >&2; exit {code} ;; esac'
    put(tmp_path / "bin", "srun", f"{refusal}\n{srun}")
    assert lab.attempt() == (code or 1)
    (line,) = attempts(lab.run)
    assert (line["cause"], line["bad_nodes"]) == ("node_failure", ["n1"])
    assert calls(lab.fake) == "scontrol requeue 100_0\nscontrol update JobId=100_0 ExcNodeList=n1\n"


def test_a_node_without_a_word_in_the_node_check_is_lost(lab: Lab, tmp_path: Path) -> None:
    lab.launch([point(0)])
    put(tmp_path / "bin", "srun", "exit 1")
    assert lab.attempt() == 1
    assert attempts(lab.run)[0]["cause"] == "node_failure"
    assert not (lab.run / "logs/attempt_1/rank_0.log").exists()


def test_of_two_nodes_the_one_on_which_nothing_starts_is_avoided(lab: Lab, tmp_path: Path) -> None:
    lab.launch([point(0, trainer__experiment_name="crash")])
    srun = (tmp_path / "bin/srun").read_text()
    put(tmp_path / "bin", "srun", f'case "$*" in *--nodelist=n2*) exit 1 ;; esac\n{srun}')
    lab.attempt(SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="n[1-2]")
    (line,) = attempts(lab.run)
    assert (line["cause"], line["bad_nodes"]) == ("node_failure", ["n2"])


@pytest.mark.parametrize("case", ["begin", "setup", "folder"])
def test_an_attempt_that_cannot_begin_is_queued_again_elsewhere(lab: Lab, case: str) -> None:
    """The run folder can't be written there, the site's setup fails, or the folder isn't there."""
    lab.launch([point(0)], setup=["exit 3"] if case == "setup" else None)
    if case == "begin":
        (lab.run / "logs").write_text("in the way, as a read-only file system would be")
    if case == "folder":
        lab.run.rename(lab.run.with_name("moved"))
    assert lab.attempt() == 1
    once = "scontrol requeue 100_0\nscontrol update JobId=100_0 ExcNodeList=n1\n"
    assert calls(lab.fake) == once
    for restart in range(1, 5):
        assert lab.attempt(restarts=restart) == 1
    assert calls(lab.fake) == once * 3  # then it stops
    (note,) = lab.sweep.glob(".submitit/*/cannot_begin_0")
    assert note.read_text().count(" n1: exit code ") == 5
    assert "no attempt could begin on n1" in (lab.fake / "batch.log").read_text()


def test_a_setup_line_that_fails_ends_the_attempt_and_is_named(lab: Lab) -> None:
    lab.launch([point(0)], setup=["module() { return 1; }", "module load cuda"])
    assert lab.attempt() == 1
    log = (lab.fake / "batch.log").read_text()
    assert "the setup line failed with exit code 1: module load cuda (append '|| true'" in log
    assert "no attempt could begin on n1" in log and "scontrol requeue" in calls(lab.fake)


def test_setup_lines_may_test_and_call_what_fails_inside(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "profile.sh"
    file.write_text("false\ntrue\n")
    lines = [
        "[ -e /no/such/file ] && echo there",
        "if false; then",
        "  echo one",
        "else",
        "  echo two",
        "fi",
        "inner() { false; true; }; inner",
        f". {file}",
        "false || true",
    ]
    lab.launch([point(0)], setup=lines)
    assert lab.attempt() == 0


def test_a_job_that_slurm_ends_is_not_queued_again_because_it_cannot_begin(lab: Lab) -> None:
    lab.launch([point(0)], setup=["exit 3"])
    (lab.fake / "job").write_text("JobState=COMPLETING Restarts=0 PreemptTime=None")
    assert lab.attempt() == 1
    assert calls(lab.fake) == ""


def test_where_nothing_can_be_written_slurms_own_count_bounds_the_restarts(lab: Lab) -> None:
    lab.launch([point(0)], setup=["exit 3"])
    (note,) = [folder / "cannot_begin_0" for folder in lab.sweep.glob(".submitit/*")]
    note.mkdir()
    assert lab.attempt(restarts=19) == 1 and "requeue" in calls(lab.fake)
    before = calls(lab.fake)
    assert lab.attempt(restarts=20) == 1 and calls(lab.fake) == before


def test_a_node_is_avoided_as_well_as_those_before_while_enough_are_left(lab: Lab) -> None:
    lab.launch([point(0, trainer__experiment_name="x", cluster={"min_shm_gb": 1e6})])
    job = "JobState=RUNNING Restarts=0 PreemptTime=None ExcNodeList=n7"
    (lab.fake / "job").write_text(job)
    (lab.fake / "nodes").write_text("n1\nn2\nn3\n")
    assert lab.attempt() == 77
    assert "ExcNodeList=n7,n1" in calls(lab.fake)
    (lab.fake / "nodes").write_text("n1\nn2\n")  # both are on the list that the fake expands
    (lab.fake / "calls").unlink()
    lab.attempt(restarts=1)
    assert calls(lab.fake) == "scontrol requeue 100_0\n"
    assert (
        "n1 is not excluded: 0 other nodes are left, 1 wanted"
        in (lab.fake / "batch.log").read_text()
    )


def test_an_unfit_node_is_left_and_avoided(lab: Lab) -> None:
    lab.launch([point(0, cluster={"min_shm_gb": 1e6})])
    assert lab.attempt() == 77
    assert attempts(lab.run)[0]["bad_nodes"] == ["n1"]
    assert calls(lab.fake) == "scontrol requeue 100_0\nscontrol update JobId=100_0 ExcNodeList=n1\n"
    assert not (lab.run / "metrics.jsonl").exists()
    for restart in range(1, 4):
        lab.attempt(restarts=restart)
    assert calls(lab.fake).count("requeue") == 3  # max_bad_nodes
    assert "used up" in attempts(lab.run)[-1]["why"]


def test_an_attempt_that_died_with_its_node_is_written_down_by_the_next(lab: Lab) -> None:
    lab.launch([point(0)])
    process = lab.start(STANDIN_STEP_S="10")
    log = lab.run / "logs/attempt_1/rank_0.log"
    until(lambda: log.exists() and "rank 0" in log.read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=200)
    for orphan in [
        p for p in Path("/proc").iterdir() if p.name.isdigit() and _is_worker(p, lab.run)
    ]:
        os.kill(int(orphan.name), signal.SIGKILL)
    begun = read_json(lab.run / "logs/attempt_1/begin.json")["start"]
    (lab.fake / "sacct").write_text(f"NODE_FAIL|0:0|n1|{int(begun) + 1}\nRUNNING|0:0|n2|Unknown\n")
    assert lab.attempt(restarts=1) == 0
    lost, done = attempts(lab.run)
    assert (lost["cause"], lost["attempt"], lost["nodes"]) == ("node_failure", 1, "n1")
    assert (
        lost["gpu_s"] == lost["wall_s"] <= 1.0
    )  # as accounting has it, not until the next attempt came
    assert (done["cause"], done["attempt"]) == ("done", 2)


def test_no_override_can_inject_shell(lab: Lab) -> None:
    evil = "x'; touch PWNED; $(touch PWNED) `touch PWNED` \"\n#SBATCH --uid=0"
    with pytest.raises(Exception, match="experiment_name"):
        lab.launch(
            [
                point(
                    0,
                    f"trainer.experiment_name={evil}",
                    trainer__experiment_name=evil,
                    trainer__nope=1,
                )
            ]
        )
    lab.launch(
        [point(0, f"trainer.experiment_name={evil}", trainer__project_name="p; touch PWNED")],
        sweep="$(touch PWNED)",
    )
    assert lab.attempt() == 0
    assert not list(lab.sweep.parent.rglob("PWNED")) and not Path("PWNED").exists()
    assert "--uid=0" not in (lab.fake / "script0").read_text()


def test_secrets_are_in_no_file(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-k3y")
    lab.launch([point(0)])
    assert lab.attempt() == 0
    for path in (p for p in lab.sweep.rglob("*") if p.is_file()):
        assert b"s3cr3t-k3y" not in path.read_bytes(), path


LEAKED = {
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_EXPORT": "NONE",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_CPU_BIND": "mask_cpu:0x1",
    "SLURM_JOB_ID": "9",
    "SRUN_CPUS_PER_TASK": "3",
    "SQUEUE_FORMAT": "%i",
    "PMIX_RANK": "1",
    "RANK": "5",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "5",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
    "OMP_NUM_THREADS": "64",
    "CUDA_VISIBLE_DEVICES": "7",
    "PLIMSOLL_ATTEMPT": "4",
    "PLIMSOLL_IMAGE_DIGEST": "sha256:0",
    "WANDB_RUN_ID": "abc",
    "WANDB_NAME": "x",
    "PYTHONPATH": "/elsewhere",
    "VIRTUAL_ENV": "/elsewhere",
    "APPTAINERENV_LD_PRELOAD": "x.so",
    "SINGULARITYENV_RANK": "1",
    "SSH_TTY": "/dev/pts/1",
}
PASSING = {
    "SLURM_CONF": "/etc/x.conf",
    "WANDB_API_KEY": "s3cr3t-k3y",
    "HF_TOKEN": "t0k3n",
    "HF_HOME": "/cache/hf",
    "https_proxy": "http://proxy:1",
    "LC_ALL": "C.UTF-8",
    "NCCL_DEBUG": "INFO",
    "BASH_FUNC_module%%": "() {  echo\n}",
    "MY_VARIABLE": "x",
}


def test_of_the_submitting_environment_only_what_is_listed_reaches_sbatch(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_fake(lab.fake, "timeout", 'echo "$@" > "$FAKE/argv"; shift; exec "$@"')
    for name, value in (LEAKED | PASSING).items():
        monkeypatch.setenv(name, value)
    lab.launch([point(0, cluster={"env": ["MY_VARIABLE"]})])
    lines = (lab.fake / "sbatch.env").read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines if "=" in line)
    assert not set(LEAKED) & set(seen)
    assert {*PASSING, "HOME", "PATH"} <= set(seen) and seen["MY_VARIABLE"] == "x"
    words = (lab.fake / "argv").read_text()
    assert "sbatch --export=ALL" in words and not any(v in words for v in PASSING.values() if v[1:])
    shown = capsys.readouterr().out
    assert "SBATCH_TIMELIMIT=1 in your environment is not used: the plan says --time=60" in shown
    assert "SBATCH_NO_REQUEUE=1 in your environment is not used: jobs are queued again" in shown
    assert "RANK" in shown and "PYTHONPATH" in shown and "SSH_TTY" not in shown


def test_a_site_s_export_none_reaches_no_rank(lab: Lab) -> None:
    """srun would start the ranks without PATH and without secrets."""
    put_fake(lab.fake, "srun", 'echo "$SLURM_EXPORT_ENV" >> "$FAKE/export"\n' + FAKES["srun"])
    lab.launch([point(0)])
    assert lab.attempt(SLURM_EXPORT_ENV="NONE", RANK="5", WORLD_SIZE="16") == 0
    assert set((lab.fake / "export").read_text().split()) == {"ALL"}


def test_what_runs_is_what_was_there_at_submit(lab: Lab) -> None:
    lab.launch([point(0)])
    assert read_json(lab.run / "job.json")["git"].keys() <= {"commit", "dirty"}
    (code,) = (lab.sweep / "code").iterdir()
    assert read_json(lab.run / "job.json")["code"] == code.name
    assert (code / "trainer/worker.py").exists() and (code / "conf/config.yaml").exists()
    put(
        code / "jobs/attempt",
        "bookkeeping.py",
        "not used: the test's own tree comes first on PYTHONPATH only after the snapshot",
    )
    assert lab.attempt() == 1  # the snapshot is what runs, broken as it is now


@pytest.mark.parametrize("change", ["", "touched", "changed"])
def test_an_image_that_changes_while_the_job_waits_is_refused(lab: Lab, change: str) -> None:
    image = lab.fake.parent / "it's.sif"
    image.write_bytes(b"one")
    put(lab.fake.parent / "bin", "apptainer", APPTAINER)
    container = {"runtime": "apptainer", "image": str(image), "python": sys.executable}
    lab.launch([point(0, container=container)])
    if change:
        image.write_bytes({"touched": b"one", "changed": b"two"}[change])
        os.utime(image, (1, 1))
    code = lab.attempt()
    (line,) = attempts(lab.run)
    if change != "changed":
        assert (code, line["cause"]) == (0, "done"), (lab.fake / "batch.log").read_text()
        return
    assert (code, line["cause"], line["requeue"]) == (1, "image_changed", False)
    digest = hashlib.sha256(b"two").hexdigest()
    assert digest in line["why"] and "container.verify=false" in line["why"]
    assert line["why"] in (lab.run / "logs/attempt_1/rank_0.log").read_text()
    (entry,) = ledger.read(lab.ledger)
    assert states_of([entry], None)[entry.run].state == "FAILED"
    assert calls(lab.fake) == "" and not (lab.run / "metrics.jsonl").exists()


def test_a_changed_image_runs_where_that_is_asked_for(lab: Lab) -> None:
    image = lab.fake.parent / "x.sif"
    image.write_bytes(b"one")
    put(lab.fake.parent / "bin", "apptainer", APPTAINER)
    container = {
        "runtime": "apptainer",
        "image": str(image),
        "python": sys.executable,
        "verify": False,
    }
    lab.launch([point(0, container=container)])
    image.write_bytes(b"another")
    assert lab.attempt() == 0, (lab.fake / "batch.log").read_text()
    digest = f"sha256:{hashlib.sha256(b'another').hexdigest()}"
    assert read_json(lab.run / "logs/attempt_1/begin.json")["image"] == digest


def test_a_config_with_a_mended_reward_is_another_run(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = lab.fake.parent / "score.py"
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0\n"
    reward.write_text(text)
    again = {"custom_reward_function__path": str(reward)}
    for mended in (text, text, text.replace("return 0", "return 1")):
        reward.write_text(mended)
        lab.launch([point(0, **again)])
    assert capsys.readouterr().out.count("left out 0: launched before") == 1
    old, new = (read_json(run / "job.json")["files"] for run in lab.sweep.glob("000-*"))
    key = "custom_reward_function.path"
    assert old[key].startswith("sha256:") and old[key] != new[key]
    copies = {path.read_text() for path in lab.sweep.glob("000-*/user/*/score.py")}
    assert copies == {text, text.replace("return 0", "return 1")}


def test_a_second_launch_runs_the_code_of_its_own_time(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mended line must not be missing from what is launched into the same sweep folder."""
    package = lab.fake.parent / "jobs"
    shutil.copytree(ROOT / "jobs", package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(
        "jobs.submit.snapshot.package_folder", lambda name: {"jobs": package}.get(name, ROOT / name)
    )
    codes = []
    for seed in range(3):
        lab.launch([point(seed, trainer__seed=seed)])
        run = next(lab.sweep.glob(f"00{seed}-*"))
        codes.append(read_json(run / "job.json")["code"])
        script = (lab.fake / f"script{seed}").read_text()
        folder = next(line for line in script.splitlines() if line.startswith("FOLDER="))
        task = Path(shlex.split(folder.removeprefix("FOLDER="))[0]) / "task.sh"
        assert f"/code/{codes[-1]}" in task.read_text()
        if seed == 1:
            (package / "mended.py").write_text("")
    assert codes[0] == codes[1] != codes[2]
    assert (lab.sweep / "code" / codes[2] / "jobs/mended.py").exists()
    assert not (lab.sweep / "code" / codes[0] / "jobs/mended.py").exists()


def test_the_payload_holds_strings_only(lab: Lab) -> None:
    lab.launch([point(0)])
    code = (
        "import sys, submitit.core.utils as u; "
        "d = u.DelayedSubmission.load(sys.argv[1]); print(vars(d.function))"
    )
    pickle = next(iter(lab.sweep.glob(".submitit/*/*_submitted.pkl")))
    out = subprocess.run(
        [sys.executable, "-c", code, str(pickle)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
    )
    assert out.stdout.strip() == str({"run": str(lab.run)}), out.stderr
    assert json.loads((lab.run / "job.json").read_text())["overrides"] == []
