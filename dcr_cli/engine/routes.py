"""The routes by which vLLM and SGLang pause, load a folder again, forget what was computed with the old weights, take a
label for the new ones, and go on.

An engine whose reload has failed is not told to go on: what it holds is nobody's. That it says it is healthy proves
nothing; that it says the new label does.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dcr_cli import stopping
from dcr_cli.checkpoint.names import shown
from dcr_cli.engine.calls import CallError, Server
from dcr_cli.errors import ConflictError, HookError

_DEVELOPMENT = "start it with VLLM_SERVER_DEV_MODE=1, which gives it these routes"
_NEWER = "it needs a newer version, which labels weights; this one was not paused, and serves what it served before"
_VLLM_UP = "see that vLLM is up, at this address, with VLLM_SERVER_DEV_MODE=1"
_SGLANG_UP = "see that SGLang is up, at this address"
_BROKEN = "what it holds is not known: start it anew, then run the same command again"
_AGAIN = "the bytes are in place; the same command, or the next pull, tries it again"
_ANEW = "run the same command again, which has it load all of it anew"


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is to load, what it calls it then, and how long that may take."""

    checkpoint: str
    label: str
    seconds: float


class Routes(Protocol):
    """What one kind of engine is told. Each raises HookError."""

    @property
    def what(self) -> str:
        """The engine, for people."""

    def look(self) -> None:
        """See that the engine is there and has the routes, that which shows a label too; nothing of it is changed."""

    def pause(self) -> None: ...

    def load(self, load: Load) -> None:
        """Have it load a folder; what fails leaves nobody knows what."""

    def settle(self, label: str) -> None:
        """Have it forget what it computed with the old weights, and say the label of the new ones."""

    def resume(self) -> None: ...


class VllmRoutes:
    """vLLM's, which it has in development mode alone."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def what(self) -> str:
        return self._server.what

    def look(self) -> None:
        _look(self._server, "/is_paused", absent=_DEVELOPMENT, unanswered=_VLLM_UP)
        # It is needed after the load, when an engine that lacks it could not go on.
        _check_label(self._server, "/weight_info", _look(self._server, "/weight_info", absent=_NEWER))

    def pause(self) -> None:
        self._server.post("/pause?mode=keep")
        _expect(self._server, "/is_paused", self._server.get("/is_paused"), "is_paused", True)

    def load(self, load: Load) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": load.checkpoint}, "timeout": load.seconds}
        answer = self._server.post_once("/collective_rpc", body, load.seconds)
        # Each worker says nothing if it has loaded; what else it says is something that went wrong.
        results = answer.get("results")
        if not isinstance(results, list) or not results or any(result is not None for result in results):
            facts = f"/collective_rpc answered {shown(str(answer))}, null of each worker expected"
            raise HookError(self._server.what, facts)

    def settle(self, label: str) -> None:
        # Those that wait hold blocks, which would keep what the old weights have computed.
        answer = self._server.post("/reset_prefix_cache?reset_running_requests=true")
        _expect(self._server, "/reset_prefix_cache", answer, "success", True)
        self._server.post("/update_weight_version", {"new_version": label})
        _expect(self._server, "/weight_info", self._server.get("/weight_info"), "weight_version", label)

    def resume(self) -> None:
        self._server.post("/resume")
        _expect(self._server, "/is_paused", self._server.get("/is_paused"), "is_paused", False)


class SglangRoutes:
    """SGLang's."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def what(self) -> str:
        return self._server.what

    def look(self) -> None:
        found = _look(self._server, "/model_info", absent=_NEWER, unanswered=_SGLANG_UP)
        _check_label(self._server, "/model_info", found)

    def pause(self) -> None:
        # What runs goes back to the queue and gives up its blocks, so that the cache can be flushed.
        self._tell("/pause_generation", {"mode": "retract"}, "status", "ok")
        # Its answer is text, but for one that says that it has failed.
        answer = self._server.post("/flush_cache")
        if not answer.get("success", True):
            raise HookError(self._server.what, f"/flush_cache failed: {shown(str(answer.get('message', answer)))}")

    def load(self, load: Load) -> None:
        body = {"model_path": load.checkpoint, "flush_cache": True}
        answer = self._server.post_once("/update_weights_from_disk", body, load.seconds)
        if answer.get("success") is not True:
            facts = f"/update_weights_from_disk failed: {shown(str(answer.get('message', answer)))}"
            raise HookError(self._server.what, facts)

    def settle(self, label: str) -> None:
        self._tell("/update_weight_version", {"new_version": label, "abort_all_requests": False}, "success", True)
        _expect(self._server, "/model_info", self._server.get("/model_info"), "weight_version", label)

    def resume(self) -> None:
        self._tell("/continue_generation", {}, "status", "ok")

    def _tell(self, path: str, body: dict[str, Any], member: str, value: object) -> None:
        _expect(self._server, path, self._server.post(path, body), member, value)


ROUTES: dict[str, Callable[[Server], Routes]] = {"vllm": VllmRoutes, "sglang": SglangRoutes}


class _Step(enum.Enum):
    """How far an engine is with a reload, by what it is left with that ends there."""

    PAUSING = "may be paused, with what it served before"
    LOADING = "stays paused, and what it holds is not known"
    GOING_ON = "may be paused, with what it was to load"


def reload(routes: Routes, load: Load, check: Callable[[], None]) -> tuple[float, float]:
    """Have an engine serve from a folder: for how many seconds it was paused, and how many of them it loaded.

    HookError if any of it fails. Whatever is raised, be it by a signal: before it is told to load, it goes on with what
    it had; later, it stays paused, and what is raised says so. So it does where `check`, before it takes the label,
    raises ConflictError because what it has loaded was changed meanwhile.
    """
    routes.look()
    begin = time.monotonic()
    step = _Step.PAUSING
    try:
        _leave(routes, step)
        routes.pause()
        told = time.monotonic()
        step = _Step.LOADING
        _leave(routes, step)
        routes.load(load)
        loaded = time.monotonic()
        check()
        routes.settle(load.label)
        step = _Step.GOING_ON
        _leave(routes, step)
        routes.resume()
    except HookError as error:
        raise _failure(routes, step, error) from error
    except ConflictError as error:
        raise ConflictError(error.what, f"{error.facts}; {routes.what} stays paused", hint=_ANEW) from error
    except BaseException as error:
        if step is _Step.LOADING or _still_paused(routes) is not None:
            error.add_note(f"{routes.what} {step.value}")
        raise
    stopping.leave("")
    return time.monotonic() - begin, loaded - told


def _failure(routes: Routes, step: _Step, error: HookError) -> HookError:
    """What failed, with what became of the engine."""
    if step is _Step.LOADING:
        return HookError(error.what, f"{error.facts}; it stays paused", hint=_BROKEN)
    if step is _Step.GOING_ON:
        return HookError(error.what, f"{error.facts}; it has loaded, and may be paused", hint=_AGAIN)
    fault = _still_paused(routes)
    left = "it serves what it served before" if fault is None else f"it may be paused: {fault.facts}"
    return HookError(error.what, f"{error.facts}; {left}", hint=_AGAIN)


def _still_paused(routes: Routes) -> HookError | None:
    """Have an engine go on that may be paused or not: what prevents it, if something does."""
    try:
        routes.resume()
    except HookError as error:
        return error
    except BaseException as error:
        error.add_note(f"{routes.what} may be paused")
        raise
    stopping.leave("")
    return None


def _leave(routes: Routes, step: _Step) -> None:
    """Have a process that ends at once, as at a second signal, say what it leaves."""
    stopping.leave(f"{routes.what} {step.value}")


def _look(server: Server, path: str, *, absent: str, unanswered: str | None = None) -> dict[str, Any]:
    """Ask for a document before anything is done; what is raised says what to do if there is no such route, or no
    answer."""
    try:
        return server.get(path)
    except CallError as error:
        if error.code == 404:
            raise HookError(server.what, f"has no {path}", hint=absent) from error
        if error.code is None:
            raise HookError(server.what, error.facts, hint=unanswered) from error
        raise


def _check_label(server: Server, path: str, answer: dict[str, Any]) -> None:
    if "weight_version" not in answer:
        raise HookError(server.what, f"{path} has no weight_version", hint=_NEWER)


def _expect(server: Server, path: str, answer: dict[str, Any], member: str, value: object) -> None:
    if answer.get(member) != value:
        facts = f"{path} says {member} {shown(str(answer.get(member)))}, {shown(str(value))} expected"
        raise HookError(server.what, facts)
