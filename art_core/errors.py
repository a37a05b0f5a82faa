"""Typed errors. Every message names the value, what was expected, and what to do next.

In: the facts of a fault. Out: one exception class per kind of fault, the same on client and server.
`RolloutFailure` carries the calls made before the fault, so that nothing is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_core.trajectories import Trajectory, TrajectoryGroup

_UNSET = object()


class ARTError(Exception):
    """Base of all errors raised on purpose by this project.

    Args:
        what: the fault, in one clause.
        got: the value at fault, shown with repr; left out when not given.
        expected: what would have been right.
        fix: what to do next.
    """

    def __init__(
        self, what: str, *, got: object = _UNSET, expected: str = "", fix: str = ""
    ) -> None:
        shown = "" if got is _UNSET else repr(got)
        parts = [f"{what}: got {shown}" if shown else what]
        if expected:
            parts.append(f"expected {expected}")
        text = ", ".join(parts)
        super().__init__(f"{text}. {fix}" if fix else text)
        self.what, self.got, self.expected, self.fix = what, shown, expected, fix

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled between our own processes as it is: constructors differ, and take no text."""
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(kind: type[ARTError], args: tuple[object, ...], fields: dict[str, Any]) -> ARTError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ConfigError(ARTError):
    """A setting has a value that can't work, alone or with the others."""


class BaseModelError(ARTError):
    """The base model is unknown, incomplete on disk, or of a kind that can't be used."""


class NotEnoughMemory(ARTError):
    """A base model does not fit in a device's memory; the message says how much it needs."""


class ModelNotRegistered(ARTError):
    """A trainable model was used before `await model.register(backend)`."""


class ContextOverflow(ARTError):
    """A prompt (with the tokens asked for) does not fit in the model's context."""


class GroupError(ARTError):
    """A trajectory group can't be trained as it is: empty, of mixed models, badly rewarded."""


class RewardError(GroupError):
    """A reward is missing, NaN or infinite."""


class NoTrainableTokens(GroupError):
    """A trajectory has no call whose sampled tokens are known."""


class WrongModel(GroupError):
    """A call was answered by another model than the one being trained."""


class StaleCall(GroupError):
    """A call was answered by an older step than `max_staleness` allows."""


class DataFileError(ARTError):
    """A file of training data can't be read, or holds what can't be trained."""


class RenderError(ARTError):
    """A conversation has no exact form under the base model's chat template."""


class RunFolderError(ARTError):
    """The run folder can't be made, read or written."""


class RunLocked(RunFolderError):
    """Another process holds the run folder."""


class CheckpointError(ARTError):
    """A checkpoint is missing, damaged, or can't be written."""


class CaptureError(ARTError):
    """An LLM call can't be joined with a rollout or with its token record."""


class EngineError(ARTError):
    """The inference engine failed or is closed."""


class RuntimeMissing(EngineError):
    """There is no vLLM to serve with, or one of a version that was not tested."""


class _EngineGone(EngineError):
    """The engine's process is not there. `tail` is the end of its log."""

    def __init__(self, what: str, *, tail: str, fix: str) -> None:
        super().__init__(what, fix=_with_tail(fix, tail))
        self.fix, self.tail = fix, tail


def _with_tail(fix: str, tail: str) -> str:
    return f"{fix}\nThe end of its log:\n{tail}" if tail else fix


class EngineStartFailed(_EngineGone):
    """The engine's process did not come up."""


class EngineDied(_EngineGone):
    """The engine's process ended or hung while it was in use, and is down for good."""


class SetupError(ARTError):
    """The environment that vLLM runs in can't be made."""


class TrainingError(ARTError):
    """A training step failed; weights are those of the last whole step."""


class TrainerDied(TrainingError):
    """The trainer's process ended or hung; the next call starts a new one from the last whole step.

    `tail` is the end of its log.
    """

    def __init__(self, what: str, *, tail: str, fix: str) -> None:
        super().__init__(what, fix=_with_tail(fix, tail))
        self.fix, self.tail = fix, tail


class NonFiniteStep(TrainingError):
    """A gradient, a loss or new weights were NaN or infinite, so that the step was left out.

    `tensor` is the first that was: a weight of the adapter, or "loss".
    """

    def __init__(self, what: str, *, tensor: str, got: object, fix: str) -> None:
        super().__init__(what, got=got, expected="finite numbers", fix=fix)
        self.tensor = tensor


class GatherError(ARTError):
    """A gather stopped before its end; what it gathered until then is kept.

    `gathered` holds every group in the order given, with the trajectories and failures so far.
    """

    def __init__(self, what: str, *, gathered: list[TrajectoryGroup], fix: str = "") -> None:
        super().__init__(what, fix=fix)
        self.gathered = gathered


class TooManyFailures(GatherError):
    """More rollouts failed than `max_exceptions` allows; `__cause__` is the last failure."""


class AfterEachFailed(GatherError):
    """`after_each` raised; `__cause__` is the original exception."""


class RolloutFailure(ARTError):
    """A rollout ended by a fault of the infrastructure, or was cancelled.

    `trajectory` holds every call made before; `__cause__` is the original exception.
    """

    def __init__(self, what: str, *, trajectory: Trajectory, fix: str = "") -> None:
        super().__init__(what, fix=fix)
        self.trajectory = trajectory


class ForeignError(ARTError):
    """An exception of another library that came out of a file or over the wire, as text.

    `kind` is the name of its class.
    """

    def __init__(self, text: str, *, kind: str) -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind


# --- between client and server


class PayloadError(ARTError):
    """Trajectories can't be sent as they are, or what came is cut, damaged or beyond a bound."""


class PayloadTooLarge(PayloadError):
    """There are more bytes than the server takes."""


class UnknownRecords(CaptureError):
    """Calls were sent by their record ids, and the server has no such records (any more).

    `ids` are those it does not know, or the first of them.
    """

    def __init__(self, what: str, *, ids: tuple[str, ...], fix: str = "") -> None:
        super().__init__(what, got=list(ids), fix=fix)
        self.ids = ids


class ServerError(ARTError):
    """A server can't be used, or does not do what it is asked.

    `status` is the HTTP status of its answer; None if there was none.
    """

    def __init__(
        self,
        what: str,
        *,
        status: int | None = None,
        got: object = _UNSET,
        expected: str = "",
        fix: str = "",
    ) -> None:
        super().__init__(what, got=got, expected=expected, fix=fix)
        self.status = status


class ServerUnreachable(ServerError):
    """Nobody answers at the URL, or answers stopped coming; `__cause__` is the last fault."""


class WrongKey(ServerError):
    """The server asks for an API key, or does not know the one that was sent."""


class WireMismatch(ServerError):
    """Client and server speak different versions of the wire."""


class BadAnswer(ServerError):
    """What answers is not our server: a proxy's page, another API, a broken answer."""


class ServerBusy(ServerError):
    """The server takes no more for now. `retry_after` is the wait it asked for, in seconds."""

    def __init__(
        self,
        what: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        expected: str = "",
        fix: str = "",
    ) -> None:
        super().__init__(what, status=status, expected=expected, fix=fix)
        self.retry_after = retry_after


class RequestRefused(ServerError):
    """The server understood and refused: a wrong host, something too large, a name unknown."""


class ServerFault(ServerError):
    """The server failed by a fault of its own; its log says more."""


class JobCancelled(ARTError):
    """The job was cancelled, by its client or another; the weights are those of the step before."""
