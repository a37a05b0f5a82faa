"""What is said of base models, each problem with its fix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from art_core.engine.chat_template import hermes_chatml
from art_core.errors import ARTError, BaseModelError
from art_core.finding import Finding
from art_core.readiness.about_model import about_model
from art_core.readiness.chat import Chat, chat_of
from art_core.readiness.computes import Computed, Unknown
from art_core.readiness.memory import Load
from art_core.readiness.sizes import sizes_of
from tests.readiness.models import WITH_TEMPLATE, files, shape

LOAD = Load()
TREES = Computed(None, True, (), 131_072, ("q_proj", "v_proj"), None, {})


def about(
    name: str,
    *,
    computed: Computed | Unknown = TREES,
    load: Load = LOAD,
    chat: Chat | ARTError | None = None,
) -> list[Finding]:
    found = shape(name)
    chat = chat or chat_of(files(name), hermes_chatml())
    return about_model(files(name), found, sizes_of(found), chat, computed, load)


def those(findings: Sequence[Finding], check: str, status: str = "") -> list[Finding]:
    return [f for f in findings if f.check == check and status in ("", f.status)]


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_every_problem_has_its_fix(name: str) -> None:
    findings = about(name)
    assert all(finding.fix for finding in findings if finding.status in ("warn", "fail"))
    assert [f.check for f in findings if f.status == "fail"] == (
        ["training"] if name in ("gpt-oss-20b", "qwen3.6-27b") else []
    )


def test_a_model_that_fits_gives_nothing_to_look_at() -> None:
    assert {finding.status for finding in about("qwen2.5-0.5b")} == {"pass", "skipped"}
    (skipped,) = [f for f in about("qwen2.5-0.5b") if f.status == "skipped"]
    assert skipped.check == "weights"


def test_a_template_of_one_call_an_answer_needs_nothing() -> None:
    assert those(about("llama-3.1-8b"), "tools", "warn") == []
    assert "one call an answer" in those(about("llama-3.1-8b"), "tools", "pass")[0].what
    assert "llama3_json" in those(about("llama-3.1-8b"), "tool parser", "pass")[0].what


def test_no_tools_at_all() -> None:
    (finding,) = those(about("gemma-3-1b"), "tools")
    assert finding.status == "warn"
    assert "can't call any" in finding.what


def test_a_parser_that_is_not_sure_is_to_be_looked_at() -> None:
    (finding,) = those(about("smollm3-3b"), "reasoning parser")
    assert (finding.status, finding.what[:12]) == ("warn", "likely qwen3")
    (finding,) = those(about("phi-4-mini"), "tool parser")
    assert (finding.status, finding.fix) == (
        "warn",
        "If you know one that reads it, name it (EngineConfig.tool_parser).",
    )


def test_breaks_of_one_cause_are_one_finding() -> None:
    kept, broken = those(about("qwen3-8b"), "histories")
    assert (kept.status, broken.status) == ("pass", "warn")
    assert broken.what.count(";") == 4, "five kinds of conversations"


def test_no_chat_template() -> None:
    error = BaseModelError("the base model has no chat template", fix="Choose the -Instruct one.")
    (finding,) = those(about("qwen3-8b", chat=error), "chat template")
    assert (finding.status, finding.fix) == ("fail", "Choose the -Instruct one.")


def test_rows_instead_of_trees() -> None:
    alone = Computed(
        "it has layers of kind linear_attention", True, (), 262_144, ("q_proj",), None, {}
    )
    findings = about("qwen3.5-27b", computed=alone)
    assert those(findings, "computing")[0].status == "warn"
    assert those(findings, "embedded engine")[0].fix == "Serve it by vLLM."


@pytest.mark.parametrize(
    ("computed", "said"),
    [
        (Computed(None, False, (128,), 131_072, ("q_proj",), None, {}), "sinks"),
        (Computed(None, True, (512,), 32_768, ("q_proj",), None, {}), "up to 512 tokens"),
    ],
)
def test_what_the_embedded_engine_does_not_serve(computed: Computed, said: str) -> None:
    (finding,) = those(about("gemma-3-1b", computed=computed), "embedded engine")
    assert finding.status == "warn"
    assert said in finding.what


def test_calls_that_are_too_long() -> None:
    short = Computed(None, True, (), 4096, ("q_proj",), None, {})
    (fits,) = those(about("phi-3.5-mini", computed=short), "context")
    assert fits.status == "pass"
    assert "4,096 tokens of 131,072" in fits.what
    (long,) = those(about("phi-3.5-mini", computed=short, load=Load(length=8192)), "context")
    assert long.status == "fail"


def test_a_rank_that_vllm_does_not_know() -> None:
    (finding,) = those(about("qwen3-8b", load=Load(rank=1024)), "LoRA in vLLM")
    assert (finding.status, finding.fix) == ("fail", "Train with another rank (LoraSettings.rank).")


def test_torch_is_not_needed_and_a_kind_that_nobody_knows_is_a_fault() -> None:
    (absent,) = those(
        about("qwen3-8b", computed=Unknown("torch not installed here", False)), "computing"
    )
    assert (absent.status, absent.fix) == ("skipped", "pip install 'art-langgraph[train]'")
    (strange,) = those(about("qwen3-8b", computed=Unknown("no such kind", True)), "computing")
    assert strange.status == "fail"
