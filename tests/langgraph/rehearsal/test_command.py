"""`art-langgraph rehearse` on projects of users: folders with modules of their own.

What has to do with streams, signals and what is installed runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art_langgraph.cli import main

Here = Callable[..., tuple[int, str, str]]
"""(arguments) -> status, stdout, stderr."""
ROOT = Path(__file__).parents[3]
SECONDS = 240
START = "import sys; from art_langgraph.cli import main; sys.exit(main())"
WITHOUT_TORCH = (
    "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers', 'peft', 'tokenizers', "
    "'pyarrow', 'huggingface_hub']); "
) + START
"""As where only the light install is there: importing these fails, and nobody finds them."""

AGENT = '''
from langchain.agents import create_agent
from art_langgraph import ChatArt

print("imported: [/foo] \\x1b[2J")

def order_status(order: str) -> str:
    """Where an order is."""
    print("looking up", order)
    return "on its way"

agent = create_agent(ChatArt(), [order_status]).with_config(recursion_limit=12)

def score(traj, scenario):
    return float(traj.ended == "completed" and "on its way" in traj.state["messages"][-1].text)

def flat(traj):
    return 0.5
'''
STOCK = """
from langchain.agents import create_agent
agent = create_agent("openai:gpt-4o", [])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with agent.py, and a langgraph.json that names its agent."""
    (tmp_path / "agent.py").write_text(AGENT, "utf-8")
    (tmp_path / "stock.py").write_text(STOCK, "utf-8")
    graphs = {"graphs": {"shop": "./agent.py:agent"}, "dependencies": ["."]}
    (tmp_path / "langgraph.json").write_text(json.dumps(graphs), "utf-8")
    return tmp_path


def run(
    project: Path, *arguments: str, code: str = WITHOUT_TORCH, **settings: str
) -> subprocess.CompletedProcess[bytes]:
    unwanted = {"NO_COLOR", "FORCE_COLOR", "CI", "COLUMNS", "OPENAI_API_KEY", "OPENAI_BASE_URL"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return subprocess.run(
        [sys.executable, "-c", code, "rehearse", *arguments],
        cwd=project,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=kept | {"PYTHONPATH": str(ROOT)} | settings,
        timeout=SECONDS,
        check=False,
    )


@pytest.fixture
def here(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Here]:
    """The command in this process, started in the project; what it imports is forgotten."""
    monkeypatch.chdir(project)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    paths, modules = list(sys.path), set(sys.modules)

    def start(*arguments: str) -> tuple[int, str, str]:
        status = main(["rehearse", *arguments])
        return status, *capfd.readouterr()

    yield start
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if str(project) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_sound_agent_is_status_0_without_torch(project: Path) -> None:
    done = run(project, "agent.py:agent", "--reward", "agent.py:score")
    out = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert "This agent can be trained" in out
    assert "rewards differ" in out
    assert "skipped checkpoint" in out
    assert "not installed (torch" in out
    assert "«order_status" in out
    assert "A scripted model played" in out
    assert b"\x1b" not in done.stdout  # a pipe: no escapes
    assert b"\r" not in done.stdout
    assert "looking up" not in out  # what the user's code prints goes to stderr
    assert b"looking up" in done.stderr


def test_an_agent_that_has_nothing_to_learn_from_is_status_1(here: Here) -> None:
    status, out, _ = here("shop", "--reward", "agent.py:flat", "--group", "3", "--no-train")
    assert status == 1
    assert "This agent can't be trained as it is" in out
    assert "all rewards of a group are equal (0.5)" in out


def test_json_is_one_document_and_nothing_else(project: Path) -> None:
    (project / "tasks.jsonl").write_text(
        '{"messages": [["user", "Where is 7?"]]}\n{"messages": [["user", "And 8?"]]}\n', "utf-8"
    )
    done = run(project, "agent:agent", "--json", "--scenarios", "tasks.jsonl", "--group", "2")
    told = json.loads(done.stdout)
    assert (done.returncode, told["status"]) == (0, "pass")
    assert [(r["scenario"], r["manner"]) for r in told["rollouts"]] == [
        (0, "thorough"), (0, "brief"), (1, "thorough"), (1, "brief"),
    ]  # fmt: skip
    first, second = told["rollouts"][0]["calls"]
    assert first["tools_called"] == ["order_status"]
    assert first["goes_on_from"] is None
    assert second["goes_on_from"] == 0
    assert second["drift"] is None
    assert first["trained_tokens"] > 0
    # What the second call reads anew: all of its prompt but what the first one read and said.
    known = first["prompt_tokens"] + first["trained_tokens"]
    assert second["prompt_tokens"] == known + second["new_context_tokens"]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["broken.py:agent"], "ConfigError", "ZeroDivisionError"),
        (["nowhere:agent"], "ConfigError", "nowhere"),
        (["agent.py:agent", "--scenarios", "tasks.jsonl"], "ConfigError", '"input"'),
        (["agent.py:agent", "--stock", "--model", "tiny"], "ConfigError", "scripted model only"),
    ],
)
def test_json_says_so_too_where_nothing_could_be_played(
    project: Path, here: Here, arguments: list[str], kind: str, words: str
) -> None:
    (project / "broken.py").write_text("agent = 1 / 0\n", "utf-8")
    (project / "tasks.jsonl").write_text('{"task": "Where is 7?", "answer": "here"}\n', "utf-8")
    status, out, err = here(*arguments, "--json", "--no-train")
    told = json.loads(out)
    assert status == 1
    assert (told["status"], told["error"]["type"]) == ("error", kind)
    assert words in json.dumps(told["error"], ensure_ascii=False).replace('\\"', '"')
    assert "art-langgraph: " in err


def test_any_stdout_will_do(project: Path) -> None:
    done = run(project, "shop", "--group", "1", PYTHONIOENCODING="ascii", COLUMNS="20")
    assert done.returncode == 0, done.stderr
    assert b"This agent can be trained" in done.stdout


def test_a_stock_model_without_a_key_is_told_what_to_replace(here: Here) -> None:
    status, _, told = here("stock.py:agent")
    assert status == 1
    assert 'agent = create_agent("openai:gpt-4o", [])' in told  # their own line
    assert 'in the place of the "provider:model" string' in told
    assert "art_langgraph/" not in told  # and none of ours


def test_stock_clients_can_ask_the_scripted_model_too(project: Path) -> None:
    old = {"OPENAI_API_BASE": "http://127.0.0.1:9/v1"}  # what the user has set is not asked
    done = run(project, "stock.py:agent", "--stock", "--json", **old)
    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert [len(r["calls"]) for r in told["rollouts"]] == [1] * 5
    assert all(call["trained_tokens"] > 0 for r in told["rollouts"] for call in r["calls"])
    (finding,) = [f for f in told["findings"] if f["check"] == "model calls"]
    assert "a stock client in model, joined by id" in finding["what"]
    (finding,) = [f for f in told["findings"] if f["check"] == "checkpoint"]
    assert finding["status"] == "skipped"
    assert "stock clients go on asking the scripted model" in finding["what"]


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("import os\nDB = os.environ['SHOP_DB']\n", "KeyError: 'SHOP_DB'"),
        ("def f(:\n", "SyntaxError"),
        ("import sys\nsys.exit('usage')\n", "ends the program when it is imported"),
        ("def graph():\n    return {}['missing']\n", "KeyError: 'missing'"),
        ("graph = 3\n", "this can't be played"),
        ("from .words import WORD\n", "Name it as a module"),
        (
            "from art_langgraph import ChatArt\ngraph = ChatArt()\ngraph.invoke('hi')\n",
            "runs its agent when it is imported",
        ),
    ],
)
def test_faults_of_the_users_module_are_shown_as_theirs(
    project: Path, here: Here, module: str, told: str
) -> None:
    (project / "broken.py").write_text(module, "utf-8")
    status, out, err = here("broken.py:graph")
    assert (status, out) == (1, "")
    assert told in err
    assert "art_langgraph/" not in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere",), "lists no graph of this name"),
        (("agent.py:agnet",), "has no such graph"),
        (("shopp.agent:graph",), "Looked for in"),
        (("shop", "--reward", "agent.py:agent"), "the reward is no function"),
        (("shop", "--reward", "agent.py:scor"), "no such function"),
        (("shop", "--reward", "agent.py:scor"), "'score'"),
        (("shop", "--scenarios", "none.jsonl"), "can't be read"),
        (("shop", "--stock", "--model", "tiny"), "--stock goes with the scripted model only"),
    ],
)
def test_names_that_are_not_there_are_one_message(
    here: Here, arguments: tuple[str, ...], told: str
) -> None:
    status, _, err = here(*arguments)
    assert status == 1
    assert told in err
    assert "Traceback" not in err


def test_a_node_that_hangs_does_not_hold_the_command(project: Path) -> None:
    (project / "hanging.py").write_text(
        "import time\nfrom langgraph.graph import START, MessagesState, StateGraph\n"
        "def wait(state):\n    time.sleep(600)\n"
        "graph = StateGraph(MessagesState).add_node(wait).add_edge(START, 'wait').compile()\n",
        "utf-8",
    )
    done = run(project, "hanging.py:graph", "--timeout", "0.5")
    assert done.returncode == 1
    assert b"took more than 0.5 s; the last node to begin was wait" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="not on this platform: no SIGINT to a child")
def test_ctrl_c_ends_it_in_good_order(project: Path) -> None:
    (project / "waiting.py").write_text(
        "import asyncio\nfrom langgraph.graph import START, MessagesState, StateGraph\n"
        "async def wait(state):\n    print('waiting', flush=True)\n    await asyncio.sleep(600)\n"
        "graph = StateGraph(MessagesState).add_node(wait).add_edge(START, 'wait').compile()\n",
        "utf-8",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, "rehearse", "waiting.py:graph", "--timeout", "500"],
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    while b"waiting" not in process.stderr.readline():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert out == b""
    assert b"Stopping" in err
    assert b"Traceback" not in err


@pytest.mark.slow
def test_where_torch_is_a_step_is_learned_saved_and_taken_up_again(project: Path) -> None:
    for name in ("torch", "transformers", "peft", "pyarrow"):
        pytest.importorskip(name, reason="art-langgraph[train] is not installed")
    done = run(project, "shop", "--model", "tiny", "--group", "2", "--json", code=START)
    told = json.loads(done.stdout)
    assert (told["player"], told["note"]) == ("tiny", None)
    assert [r["manner"] for r in told["rollouts"]] == ["sampled", "sampled"]
    assert all(r["calls"] for r in told["rollouts"])
    (finding,) = [f for f in told["findings"] if f["check"] == "checkpoint"]
    assert finding["status"] == "pass", finding
    assert "learned a step" in finding["what"]
    assert list(project.glob(".art*")) == []  # it leaves nothing behind
