"""The quickstart's report of a recorded run: the figures, the picture, the page.

The run is told in recorded_run.py; the figures that are stated follow from it.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("pyarrow", reason="art-langgraph[train] is not installed")
pytest.importorskip("matplotlib", reason="art-langgraph[train] is not installed")

from art_core.errors import ConfigError
from art_langgraph.quickstart.customers import PARTS, TOOLS
from art_langgraph.quickstart.report import make_report, write_report
from art_langgraph.visible import visible
from tests.langgraph.recorded_run import MODEL_TEXTS, RECIPE, SHOWN_TEXTS, record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report folder, of a run whose model said everything in MODEL_TEXTS."""
    path = tmp_path_factory.mktemp("recorded")
    run, journal = record(path / ".art", said="\n".join(MODEL_TEXTS))
    write_report(path / "report", run, RECIPE, journal)
    return path / "report"


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    text = (folder / "report.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def test_the_report_says_what_was_measured(report: dict[str, Any]) -> None:
    assert report["reward_first"] == pytest.approx(1 / 3)
    assert report["reward_last"] == pytest.approx(1.0)
    assert report["heldout_before"] == pytest.approx(1 / 3)
    assert report["heldout_after"] == 1.0
    assert report["seconds"] == 63.0
    assert report["first_reward_seconds"] == 9.0
    assert (report["steps"], report["stopped"], report["seed"]) == (2, "max_steps", 0)
    assert report["checkpoint"] == 3
    assert report["warm_up"] == {"examples": 3, "steps": 1, "seconds": 3.0}
    assert [point["step"] for point in report["curve"]] == [0, 1]
    assert report["reward_parts"] == dict(PARTS)
    assert report["phases"] == {
        "load": 5.0,
        "warm_up": 3.0,
        "before": 10.0,
        "learn": 40.0,
        "after": 5.0,
    }
    assert report["failures"] == 1
    # 12 rollouts a step of 3 sampled tokens each, in 4 seconds.
    assert report["tokens_per_second"] == pytest.approx(12 * 3 / 4)
    assert report["machine"]["usable_cores"] >= 1
    assert report["versions"]["art-langgraph"]
    assert report["settings"]["train"]["learning_rate"] == RECIPE.train.learning_rate


def test_what_is_not_finite_is_null(report: dict[str, Any]) -> None:
    assert report["entropy"] == [1.5, None]


def test_every_tool_has_its_share(report: dict[str, Any]) -> None:
    tools = report["per_tool"]
    assert list(tools) == list(TOOLS)
    assert [tool["before"] for tool in tools.values()] == [1.0, 0.0, 0.0]
    assert [tool["after"] for tool in tools.values()] == [1.0, 1.0, 1.0]
    for tool in tools.values():
        assert tool["reward_share"] == tool["customer_share"] == pytest.approx(1 / 3)


def test_the_constant_answer_was_judged(report: dict[str, Any]) -> None:
    """Three customers, one a tool, who share no argument: a fixed call is right for one."""
    constant = report["constant_answer_baseline"]
    assert constant["success"] == pytest.approx(1 / 3)
    assert 1 / 3 <= constant["reward"] < 1.0
    assert constant["tool"] in TOOLS


def test_an_unfinished_run_has_no_report(tmp_path: Path) -> None:
    _, journal = record(tmp_path)
    journal.after = None
    with pytest.raises(ConfigError, match="finished"):
        make_report(RECIPE, journal, [])


def test_the_picture_is_a_png_of_the_promised_size(folder: Path) -> None:
    data = (folder / "reward.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    # IHDR: width and height are the two big-endian words after length and type (PNG, 11.2.2).
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1600, 900)


# --- the page

VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Reads a page strictly: every element closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def read(folder: Path) -> Reader:
    reader = Reader()
    reader.feed((folder / "index.html").read_text("utf-8"))
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_needs_nothing_beside_it(folder: Path, read: Reader) -> None:
    tags = {tag for tag, _ in read.seen}
    assert not tags & {"script", "iframe", "img", "object", "embed", "form", "base"}
    for _, attributes in read.seen:
        assert not {"src", "srcset", "onload", "onclick"} & set(attributes)
        assert attributes.get("href") in (None, "data:,")
    source = (folder / "index.html").read_text("utf-8")
    assert "url(" not in source
    assert "@import" not in source
    assert "default-src 'none'" in source
    assert not re.search(r"https?://", source)


@pytest.mark.parametrize("text", SHOWN_TEXTS)
def test_the_page_shows_the_models_text_letter_for_letter(read: Reader, text: str) -> None:
    assert text in read.text


def test_the_page_tells_the_story(read: Reader) -> None:
    assert "The agent learned its job" in read.text
    assert "33%" in read.text
    assert "100%" in read.text
    assert "the network failed" in read.text  # a rollout that failed is shown
    assert ("article", {}) in read.seen
    for name in (*PARTS, *TOOLS):
        assert name in read.text


def test_the_page_can_be_read_without_seeing_it(read: Reader) -> None:
    tags = [tag for tag, _ in read.seen]
    html = next(attributes for tag, attributes in read.seen if tag == "html")
    drawing = next(attributes for tag, attributes in read.seen if tag == "svg")
    assert html["lang"] == "en"
    assert (drawing["role"], drawing["aria-labelledby"]) == ("img", "curve-told")
    assert {"header", "main", "footer", "h1", "h2", "h3", "h4", "table"} <= set(tags)
    heads = [attributes for tag, attributes in read.seen if tag == "th"]
    assert heads
    assert all("scope" in attributes for attributes in heads)


# --- text of others


@pytest.mark.parametrize(("text", "shown"), [*zip(MODEL_TEXTS, SHOWN_TEXTS, strict=True)])
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_visible_leaves_line_ends_and_tabs() -> None:
    assert visible("a\tb\nc\x7f\x9b") == "a\tb\nc\\x7f\\x9b"
