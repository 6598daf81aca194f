"""The routes by which vLLM and SGLang pause, load a folder again, forget what was computed with the old weights, take a
label for the new ones, and go on.

An engine whose reload has failed is not told to go on: what it holds is nobody's. That it says it is healthy proves
nothing; that it says the new label does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from dcr_cli.checkpoint.names import shown
from dcr_cli.engine.calls import CallError, Server
from dcr_cli.errors import HookError

_DEVELOPMENT = "start it with VLLM_SERVER_DEV_MODE=1, which gives it these routes"
_BROKEN = "it stays paused, and what it holds is not known: start it anew, then run the same command again"
_AGAIN = "the bytes are in place; the same command, or the next pull, tries it again"

Tick = Callable[[], None]


class Routes(Protocol):
    """What one kind of engine is told. Each raises HookError."""

    def look(self) -> None:
        """See that the engine is there and has the routes; nothing of it is changed."""

    def pause(self) -> None: ...

    def load(self, checkpoint: str, label: str, seconds: float) -> None:
        """Have it load a folder; what fails leaves nobody knows what."""

    def settle(self, label: str) -> None:
        """Have it forget what it computed with the old weights, and say the label of the new ones."""

    def resume(self) -> None: ...


class VllmRoutes:
    """vLLM's, which it has in development mode alone."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def look(self) -> None:
        try:
            self._server.get("/is_paused")
        except CallError as error:
            if error.code == 404:
                raise HookError(self._server.what, "has no /is_paused", hint=_DEVELOPMENT) from error
            raise

    def pause(self) -> None:
        self._server.post("/pause?mode=keep")
        _expect(self._server, "/is_paused", self._server.get("/is_paused"), "is_paused", True)

    def load(self, checkpoint: str, label: str, seconds: float) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": checkpoint}, "timeout": seconds}
        answer = self._server.post_once("/collective_rpc", body, seconds)
        if not isinstance(answer.get("results"), list) or not answer["results"]:
            raise HookError(self._server.what, f"/collective_rpc answered {shown(str(answer))}, no results of workers")

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

    def look(self) -> None:
        self._server.get("/model_info")

    def pause(self) -> None:
        # What runs goes back to the queue and gives up its blocks, so that the cache can be flushed.
        self._server.post("/pause_generation", {"mode": "retract"})
        self._server.post("/flush_cache")

    def load(self, checkpoint: str, label: str, seconds: float) -> None:
        body = {"model_path": checkpoint, "weight_version": label, "flush_cache": True}
        answer = self._server.post_once("/update_weights_from_disk", body, seconds)
        if answer.get("success") is not True:
            facts = f"/update_weights_from_disk failed: {shown(str(answer.get('message', answer)))}"
            raise HookError(self._server.what, facts)

    def settle(self, label: str) -> None:
        _expect(self._server, "/model_info", self._server.get("/model_info"), "weight_version", label)

    def resume(self) -> None:
        self._server.post("/continue_generation", {})


ROUTES: dict[str, Callable[[Server], Routes]] = {"vllm": VllmRoutes, "sglang": SglangRoutes}


def reload(routes: Routes, checkpoint: str, *, label: str, seconds: float) -> tuple[float, float]:
    """Have an engine serve from a folder: for how many seconds it was paused, and how many of them it loaded.

    HookError if any of it fails. Before it is told to load, it goes on with what it had; later, it stays paused.
    """
    routes.look()
    begin = time.monotonic()
    try:
        routes.pause()
    except HookError as error:
        _go_on(routes)
        raise HookError(error.what, f"{error.facts}; it serves what it served before", hint=_AGAIN) from error
    try:
        loading = time.monotonic()
        routes.load(checkpoint, label, seconds)
        loaded = time.monotonic()
        routes.settle(label)
    except HookError as error:
        raise HookError(error.what, error.facts, hint=_BROKEN) from error
    routes.resume()
    return time.monotonic() - begin, loaded - loading


def _go_on(routes: Routes) -> None:
    """Have an engine go on that may be paused or not; what is wrong with it is told already."""
    try:
        routes.resume()
    except HookError:
        return


def _expect(server: Server, path: str, answer: dict[str, Any], member: str, value: object) -> None:
    if answer.get(member) != value:
        facts = f"{path} says {member} {shown(str(answer.get(member)))}, {shown(str(value))} expected"
        raise HookError(server.what, facts)
