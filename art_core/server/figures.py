"""What the server counts, in the text format that Prometheus reads.

In: its jobs and models. Out: lines of `name{labels} value`.
"""

from __future__ import annotations

from collections import Counter

from art_core.server.admission import Admission
from art_core.server.ledger import Ledger
from art_core.server.run_work import RunWork

MEDIA_TYPE = "text/plain; version=0.0.4"


async def figures(
    work: RunWork, ledger: Ledger, answers: Counter[str], admission: Admission
) -> str:
    """The page.

    Args:
        answers: how many requests were answered, by class of status ("2xx").
    """
    lines = ["# TYPE art_requests_total counter"]
    lines += [f'art_requests_total{{status="{kind}"}} {n}' for kind, n in sorted(answers.items())]
    lines += ["# TYPE art_calls gauge"]
    lines += [f'art_calls{{state="running"}} {admission.running}']
    lines += [f'art_calls{{state="waiting"}} {admission.waiting}']
    lines += ["# TYPE art_jobs gauge"]
    states = Counter((job.kind, job.state) for job in ledger.jobs())
    lines += [
        f'art_jobs{{kind="{kind}",state="{state}"}} {n}'
        for (kind, state), n in sorted(states.items())
    ]
    lines += ["# TYPE art_model_step gauge"]
    for (project, name), model in sorted(work.models.items()):
        step = await work.backend.get_step(model)
        lines.append(f"art_model_step{{project={_quoted(project)},model={_quoted(name)}}} {step}")
    lines += ["# TYPE art_prompt_drift_total counter"]
    drifts = sum((service.drifts for service in work.backend.services()), Counter[str]())
    lines += [f"art_prompt_drift_total{{reason={_quoted(r)}}} {n}" for r, n in drifts.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
