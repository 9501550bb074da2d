"""Plans that a fork of the command makes: what it says is what the command would, also where it can't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autolaunch import cli
from autolaunch.planning import profiler
from tests.support.ranks import environment, start

pytestmark = [pytest.mark.timeout(120), pytest.mark.full]

PLAN = ("plan", "model=llama", "model.size=debug", "data=synthetic", "cluster=h100x8")
HELP = ("plan", "--help")
TOO_LARGE = ("plan", "model=llama", "model.size=405b", "cluster=h100x8")
COMMAND = "import os; from autolaunch.planning import ahead, profiler; {}; from autolaunch.__main__ import main; main()"


ONLY_BESIDE = (
    "import autolaunch.planning.choice as planning; here, plan = os.getpid(), planning.choice_of; "
    "planning.choice_of = lambda *asked: plan(*asked) if os.getpid() != here else os._exit(3)"
)


def planned(directory: Path, *words: str, before: str = "pass", **variables: str) -> tuple[int, str]:
    """(exit code, what was shown) of the command in a new process, which does something before."""
    env = environment(XDG_CACHE_HOME=str(directory / "cache"), COLUMNS="100", **variables)
    directory.mkdir(exist_ok=True)
    done = start([sys.executable, "-c", COMMAND.format(before), *words], cold=True, cwd=directory, env=env)
    return done.returncode, done.stdout


def notes(directory: Path) -> list[str]:
    """What only a fork writes down: models whose profile is known."""
    file = directory / "cache" / "autolaunch" / "profiles" / "lines.txt"
    return file.read_text(encoding="ascii").split() if file.exists() else []


LISTS_CHILDREN = (
    "import autolaunch.jobs.run as jobs; show = jobs._show_choice; own = f'/proc/self/task/{os.getpid()}/children'; "
    "jobs._show_choice = lambda *asked: (show(*asked), print('children', open(own).read().split()))"
)


def test_a_plan_is_the_same_wherever_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By two forks, one of which imports torch, by one that need not, here, and here after forks that ended early."""
    code, cold = planned(tmp_path, *PLAN, before=LISTS_CHILDREN)
    assert code == 0 and "8 devices" in cold and len(notes(tmp_path)) == 1
    assert "children []\n" in cold  # they would stay as long as a run
    cold = cold.replace("children []\n", "")
    again = planned(tmp_path, *PLAN, before=ONLY_BESIDE)
    planner_fails = planned(tmp_path, *PLAN, before="ahead._import_planner = lambda: os._exit(1)")
    assert len(notes(tmp_path)) == 1
    profiler_fails = planned(tmp_path / "new", *PLAN, before="profiler._profile = lambda question: os._exit(1)")
    assert not notes(tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    here = cli.run([*PLAN]), capfd.readouterr().out
    elsewhere = (again, planner_fails, profiler_fails, here)
    assert [code for code, _ in elsewhere] == [0, 0, 0, 0]
    assert {screen.partition("run it")[0] for _, screen in elsewhere} == {cold.partition("run it")[0]}


def test_what_is_wrong_is_told_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    beside = planned(tmp_path, *TOO_LARGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert beside == (cli.run(TOO_LARGE), capfd.readouterr().err)
    assert beside[0] == 2 and "nothing fits" in beside[1]
    traced = planned(tmp_path, *TOO_LARGE, HYDRA_FULL_ERROR="1")
    assert traced[0] == 1 and "in make_plan" in traced[1]


WAITS = (
    "wait = lambda *asked: (print('waits', flush=True), __import__('time').sleep(100)); "
    "profiler._profile = ahead._import_planner = wait"
)


def test_forks_end_with_the_command_however_that_ends(tmp_path: Path) -> None:
    """A plan that nobody reads any longer, of a module that may take for ever, is not made."""
    words = [sys.executable, "-c", COMMAND.format(WAITS), *PLAN]
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None and command.stdout.readline() == command.stdout.readline() == "waits\n"
        command.kill()
        assert command.communicate(timeout=20)[0] == ""  # once nobody could write there any longer


def test_variables_of_ranks_that_are_incomplete_are_told_as_ever(tmp_path: Path) -> None:
    env = environment(RANK="1")
    plan, page = (start([sys.executable, "-m", "autolaunch", *words], cwd=tmp_path, env=env) for words in (PLAN, HELP))
    assert plan.returncode == 2 and "WORLD_SIZE" in plan.stdout and "Traceback" not in plan.stdout
    assert page.returncode == 0 and "autolaunch plan" in page.stdout


OWN = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))
"""


def test_a_module_in_the_working_directory_is_planned(tmp_path: Path) -> None:
    """By the script, which has not that directory on its path, as `python -m` has."""
    (tmp_path / "own.py").write_text(OWN)
    script = str(Path(sys.executable).parent / "autolaunch")
    words = ("plan", "model=custom", "model._target_=own.Net", "data=synthetic", "cluster=h100x8")
    done = start([script, *words], cold=True, cwd=tmp_path, env=environment(XDG_CACHE_HOME=str(tmp_path / "cache")))
    assert done.returncode == 0 and "8 devices" in done.stdout, done.stdout


def test_what_a_profile_does_not_depend_on_is_no_new_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "autolaunch" / "profiles").mkdir(parents=True)
    profiler.note(PLAN)
    for more in ([], ["--full"], ["full=true"], ["--why", "dp=ddp"], ["--why=mp=2"], ["why={mp:2}"], ["mesh.pp=2"]):
        assert profiler.is_noted([*PLAN, *more]), more
    for other in (["precision=16-mixed"], ["model.size=8b"], ["--config-dir", "conf"]):
        assert not profiler.is_noted([*PLAN, *other]), other


COMPILER = """
import sys
from autolaunch_strategies.torch_private.compiler import import_compiler_when_asked
import_compiler_when_asked()
from autolaunch.planning import profiler
for module in profiler._MODULES:
    __import__(module)
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    (weight @ weight).sum().backward()
@torch.compiler.disable
@torch.compiler.disable(recursive=False)
@torch._dynamo.disable(fn=None)
def doubled(value):
    return value * 2
torch._dynamo.graph_break("nothing to break")
loaded = ["torch.distributed.fsdp" in sys.modules, "torch._dynamo.eval_frame" in sys.modules]
{}
loaded.append("torch._dynamo.eval_frame" in sys.modules)
print(loaded, torch.compile(doubled, backend="eager")(torch.ones(2)).tolist())
"""


@pytest.mark.parametrize("asks", ["import torch._dynamo.utils", "from torch._dynamo import OptimizedModule"])
def test_the_compiler_is_imported_once_something_asks_for_it(asks: str) -> None:
    done = start([sys.executable, "-c", COMPILER.format(asks)], cold=True)
    assert done.stdout == "[False, False, True] [2.0, 2.0]\n"
