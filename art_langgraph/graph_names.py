"""Where a text says that a graph is: a module, a Python file, or an entry of a `langgraph.json`.

In: "package.module:graph", "path/to/file.py:graph", "agent", "path/langgraph.json:agent". Out: the
object of that name, whatever it is. The user's code is imported as `python` itself would, so its
folder is put on `sys.path` and stays there. It leaves out calling factories (`sources`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from langchain_core.runnables import Runnable
from langgraph.graph import StateGraph

from art_core.errors import ConfigError

_FORMS = (
    '"package.module:graph", "path/to/file.py:graph", an id of a langgraph.json in the working '
    'folder, or "path/langgraph.json:id"'
)
_CONFIG = "langgraph.json"
_LOADING = threading.RLock()  # a module may name a graph while it is loaded itself


def named_graph(text: str, what: str = "graph") -> Any:
    """The object that `text` names.

    Args:
        text: see the forms above.
        what: how errors call it.

    Raises:
        ConfigError: there is no such file, module, entry or name; it says what there is. Or the
            user's module fails while it is imported, which is then the cause.
    """
    place, _, name = text.rpartition(":") if _names_a_part(text) else (text, "", "")
    path = Path(place).expanduser()
    if path.suffix == ".json":
        return _entry(path, name, text)
    if path.suffix == ".py" or os.sep in place or "/" in place:
        return _attribute(_module_of_file(path, text), name, text, what)
    if not name and Path(_CONFIG).is_file():
        return _entry(Path(_CONFIG), place, text)
    if not name:
        raise ConfigError(
            f"no {what} is named by this text, and the working folder has no langgraph.json",
            got=text,
            expected=_FORMS,
        )
    _search_first(Path.cwd())
    return _attribute(_module(place, text), name, text, what)


def _names_a_part(text: str) -> bool:
    """True if what follows the last colon is a name, and no path of a drive ("C:/x.py")."""
    after = text.rpartition(":")[2]
    return ":" in text and "/" not in after and "\\" not in after


# --- langgraph.json


def _entry(file: Path, name: str, text: str) -> Any:
    """The graph that a `langgraph.json` lists under `name`; the only one if `name` is empty."""
    graphs, folder = _graphs(file, text), file.resolve().parent
    if not name and len(graphs) == 1:
        name = next(iter(graphs))
    if name not in graphs:
        raise ConfigError(
            f"{str(file)!r} lists no graph of this name",
            got=name or text,
            expected=f"one of {_listed(graphs)}",
        )
    entry = graphs[name]
    where = entry.get("path") if isinstance(entry, Mapping) else entry
    if not isinstance(where, str) or ":" not in where:
        raise ConfigError(
            f"graph {name!r} of {str(file)!r}", got=entry, expected='"./file.py:graph"'
        )
    place, _, attribute = where.rpartition(":")
    if Path(place).suffix in (".js", ".mjs", ".ts", ".mts"):
        raise ConfigError(f"graph {name!r} is JavaScript", got=where, expected="a graph in Python")
    _search_first(folder)
    if Path(place).suffix == ".py" or "/" in place:
        return _attribute(_module_of_file(folder / place, text), attribute, text)
    return _attribute(_module(place, text), attribute, text)


def _graphs(file: Path, text: str) -> Mapping[str, Any]:
    """The graphs that a `langgraph.json` lists; its environment and local packages are set up.

    A variable that is set already keeps its value, as LangGraph's own server does it.
    """
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {str(file)!r}", got=text, expected=_FORMS) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} can't be read as JSON ({error})", got=text) from error
    graphs = told.get("graphs") if isinstance(told, Mapping) else None
    if not isinstance(graphs, Mapping) or not graphs:
        raise ConfigError(
            f"{str(file)!r} lists no graphs",
            got=graphs,
            expected='{"graphs": {"agent": "./file.py:graph"}}',
        )
    folder = file.resolve().parent
    for name, value in _environment(told.get("env"), folder).items():
        os.environ.setdefault(name, value)
    for package in told.get("dependencies") or ():
        if isinstance(package, str) and package.startswith("."):
            _search_first(folder / package)
    return graphs


def _environment(told: Any, folder: Path) -> dict[str, str]:
    """The variables of `env`: a mapping, or the name of a file of NAME=value lines."""
    if isinstance(told, Mapping):
        return {str(name): str(value) for name, value in told.items()}
    if not isinstance(told, str) or not (folder / told).is_file():
        return {}
    found = {}
    for line in (folder / told).read_text(encoding="utf-8").splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and not name.startswith("#"):
            value = value.strip()
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            found[name.strip()] = value[1:-1] if is_quoted else value.partition(" #")[0].rstrip()
    return found


# --- modules


def _module(name: str, text: str) -> ModuleType:
    """An importable module; the user's own fault in it is the cause of the error."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"there is no module {error.name!r}",
                got=text,
                expected=_FORMS,
                fix=f"Looked for in {str(Path.cwd())!r} and where Python looks.",
            ) from error
        raise _failed(name, error) from error
    except Exception as error:
        raise _failed(name, error) from error


def _module_of_file(path: Path, text: str) -> ModuleType:
    """The module in a file; one inside a package is imported by its full name."""
    file = path.resolve()
    if not file.is_file():
        near = file.parent if file.parent.is_dir() else None
        there = sorted(f.name for f in near.glob("*.py")) if near else []
        raise ConfigError(
            f"there is no file {str(path)!r}",
            got=text,
            expected=f"one of {_listed(there)}" if there else _FORMS,
            fix="Paths are relative to the working folder, in a langgraph.json to its own.",
        )
    names, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    _search_first(folder)
    if len(names) > 1:
        return _module(".".join(names), text)
    return _loaded(file)


def _loaded(file: Path) -> ModuleType:
    """The module of a lone file, loaded once, under a name that no other module has."""
    name = f"{file.stem}__{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    with _LOADING:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None  # it ends in .py and is there
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pydantic look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]  # half of it, which the next one to ask would be given
            if isinstance(error, Exception):
                raise _failed(str(file), error) from error
            raise
        return module


def _attribute(module: ModuleType, name: str, text: str, what: str = "graph") -> Any:
    """The object of that name in a module; its only graph if `name` is empty."""
    has = _graphs_in(module) if what == "graph" else []
    if not name and len(has) == 1:
        name = has[0]
    found: Any = module
    for part in name.split("."):
        if not part or not hasattr(found, part):
            raise ConfigError(
                f"module {module.__name__.partition('__')[0]!r} has no such {what}"
                if name
                else f"this text does not say which {what} of the module is meant",
                got=text,
                expected=f"one of {_listed(has or _public(module))}",
                fix=f"Write the name of the {what} after a colon.",
            )
        found = getattr(found, part)
    return found


def _graphs_in(module: ModuleType) -> list[str]:
    """Names of the graphs in a module."""
    return [n for n, v in vars(module).items() if _is_graph(v) and not n.startswith("_")]


def _is_graph(value: Any) -> bool:
    return isinstance(value, StateGraph) or (
        isinstance(value, Runnable) and hasattr(value, "nodes")
    )


def _public(module: ModuleType) -> list[str]:
    """Names that a module defines itself."""
    own = (n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__)
    return [name for name in own if not name.startswith("_")]


def _failed(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"importing {name!r} failed ({type(error).__name__}: {error})",
        fix="The graph's own code raised it; see the exception's cause.",
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"


def _search_first(folder: Path) -> None:
    """Let Python look for modules in `folder`, as if the program had been started there."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)
