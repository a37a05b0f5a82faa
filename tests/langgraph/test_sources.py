"""`open_graph`: every way to say which graph is meant, and what each error tells."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph

from art_core.errors import ConfigError
from art_langgraph.sources import open_graph

MODULE = """
from contextlib import asynccontextmanager
from langgraph.graph import START, MessagesState, StateGraph
{head}
def built(word="plain"):
    graph = StateGraph(MessagesState)
    graph.add_node(word, lambda state: {{}})
    graph.add_edge(START, word)
    return graph

graph = built().compile()
loose = built("loose")

def make(config):
    return built(config["configurable"]["word"])

async def amake(config: dict):
    return built("async")

@asynccontextmanager
async def held(config=None):
    yield built("held").compile()

class Holder:
    graph = built("inner").compile()
"""
CONFIG: RunnableConfig = {"configurable": {"word": "told"}}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user's project, as the working folder; what is imported is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def written(path: Path, head: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MODULE.format(head=head))


async def nodes_of(source: Any) -> set[str]:
    """Names of the nodes of the graph that a source stands for."""
    async with open_graph(source, CONFIG) as graph:
        assert isinstance(graph, Runnable)
        return set(getattr(graph, "nodes", ())) - {START}


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("shop_agent:graph", "plain"),
        ("shop_agent:loose", "loose"),
        ("shop_agent:make", "told"),
        ("shop_agent:amake", "async"),
        ("shop_agent:held", "held"),
        ("shop_agent:built", "plain"),
        ("shop_agent:Holder.graph", "inner"),
        ("shop_agent.py:graph", "plain"),
        ("./shop_agent.py:make", "told"),
    ],
)
async def test_texts_name_a_graph(project: Path, text: str, node: str) -> None:
    written(project / "shop_agent.py")
    assert await nodes_of(text) == {node}


async def test_a_file_of_a_package_may_import_its_neighbours(project: Path) -> None:
    (project / "shop").mkdir()
    (project / "shop/__init__.py").touch()
    (project / "shop/words.py").write_text("WORD = 'near'")
    written(project / "shop/agent.py", "from .words import WORD")
    assert await nodes_of("shop/agent.py:graph") == {"plain"}
    assert await nodes_of("shop.agent:graph") == {"plain"}


async def test_a_lone_file_may_import_what_lies_beside_it(project: Path) -> None:
    (project / "lone").mkdir()
    (project / "lone/words_beside.py").write_text("WORD = 'near'")
    written(project / "lone/agent.py", "from words_beside import WORD")
    assert await nodes_of("lone/agent.py:graph") == {"plain"}


async def test_two_files_of_one_name_are_two_modules(project: Path) -> None:
    for name in ("one", "two"):
        (project / name).mkdir()
        (project / name / "agent.py").write_text(
            MODULE.format(head="") + f"named = built({name!r})\n"
        )
    assert await nodes_of("one/agent.py:named") == {"one"}
    assert await nodes_of("two/agent.py:named") == {"two"}


async def test_langgraph_json_is_read_as_langgraph_reads_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOP_WORD", raising=False)
    monkeypatch.setenv("SHOP_KEPT", "mine")
    (project / "app/lib").mkdir(parents=True)
    (project / "app/lib/shop_words.py").write_text("WORD = 'near'")
    head = "import os\nfrom shop_words import WORD\nassert os.environ['SHOP_WORD'] == 'a b'"
    written(project / "app/src/agent.py", head)
    (project / "app/.env").write_text("# a comment\nexport SHOP_WORD='a b'\nSHOP_KEPT=theirs\n")
    graphs = {"agent": "./src/agent.py:graph", "maker": {"path": "./src/agent.py:make"}}
    told = {"dependencies": ["./lib"], "graphs": graphs, "env": "./.env"}
    (project / "app/langgraph.json").write_text(json.dumps(told))
    assert await nodes_of("app/langgraph.json:agent") == {"plain"}
    assert os.environ["SHOP_KEPT"] == "mine"
    monkeypatch.chdir(project / "app")
    assert await nodes_of("maker") == {"told"}
    monkeypatch.delenv("SHOP_WORD")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere.agent:graph", "there is no module 'nowhere'"),
        ("shop_agent:grpah", r"no such graph.*one of 'graph', 'loose'"),
        ("shop_agent.py", r"does not say which graph.*one of 'graph', 'loose'"),
        ("shop.py:graph", r"there is no file 'shop.py'.*one of 'broken.py', 'shop_agent.py'"),
        ("broken:graph", r"importing 'broken' failed \(ModuleNotFoundError.*not_installed"),
        ("agent", r"no langgraph.json.*package.module:graph"),
        ("other/langgraph.json:agent", r"there is no file 'other/langgraph.json'"),
        ("apps/langgraph.json:agnet", r"lists no graph of this name: got 'agnet'.*'agent', 'web'"),
        ("apps/langgraph.json:web", r"JavaScript"),
    ],
)
async def test_an_error_says_what_was_looked_for_and_what_there_is(
    project: Path, text: str, says: str
) -> None:
    written(project / "shop_agent.py")
    (project / "broken.py").write_text("import not_installed_anywhere")
    (project / "apps").mkdir()
    graphs = {"agent": "./a.py:graph", "web": "./web.ts:graph"}
    (project / "apps/langgraph.json").write_text(json.dumps({"graphs": graphs}))
    with pytest.raises(ConfigError, match=says):
        await nodes_of(text)


async def test_factories_of_every_kind_are_called() -> None:
    def compiled(word: str) -> Any:
        graph: StateGraph[Any] = StateGraph(MessagesState)
        graph.add_node(word, lambda state: {})
        graph.add_edge(START, word)
        return graph

    @contextmanager
    def held(settings: RunnableConfig) -> Iterator[Any]:
        yield compiled(settings["configurable"]["word"])

    @asynccontextmanager
    async def aheld(*, config: RunnableConfig) -> AsyncIterator[Any]:
        yield compiled(config["configurable"]["word"])

    def optional(word: str = "default") -> Any:
        return compiled(word)

    def two(first: str, second: str) -> Any:
        return compiled(first + second)

    assert await nodes_of(held) == {"told"}
    assert await nodes_of(aheld) == {"told"}
    assert await nodes_of(optional) == {"default"}
    with pytest.raises(ConfigError, match=r"'two' wants more than a config.*first, second"):
        await nodes_of(two)
    with pytest.raises(ConfigError, match=r"can't be played.*got 3"):
        await nodes_of(lambda: 3)


async def test_a_module_may_name_its_own_graph_while_it_is_loaded(project: Path) -> None:
    head = "from art_langgraph.graph_names import named_graph"
    written(project / "own.py", head)
    (project / "own.py").write_text(
        (project / "own.py").read_text() + "\nfound = named_graph('own.py:graph')\n"
    )
    assert await nodes_of("own.py:found") == {"plain"}


async def test_a_module_that_ends_the_program_is_not_kept_half(project: Path) -> None:
    (project / "ends.py").write_text("import sys\nsys.exit('usage')\n")
    for _ in range(2):
        with pytest.raises(SystemExit):
            await nodes_of("ends.py:graph")
