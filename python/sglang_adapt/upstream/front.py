"""The front: stock's HTTP server, tokenizer manager and detokenizer, with our router in the schedulers' place."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from sglang_adapt.core.process import die_with_parent, ignore_stop_signals
from sglang_adapt.core.profile import ProfileKey
from sglang_adapt.kv.sizing import KvShape
from sglang_adapt.upstream.command_line import named_model, parser_told, refusals_told
from sglang_adapt.upstream.containment import FRONT_CONTAINMENT
from sglang_adapt.upstream.early_answers import EARLY_ANSWERS, Answerer, use_early_answers
from sglang_adapt.upstream.patch import Patch
from sglang_adapt.upstream.rank import prepare_process
from sglang_adapt.upstream.request_checks import REQUEST_CHECKS
from sglang_adapt.upstream.shared_files import ReadLoadsOfAllSlots
from sglang_adapt.upstream.stock_refusals import body_fault
from sglang_adapt.upstream.tickets import TICKETS

logger = logging.getLogger(__name__)


AdminHandler = Callable[[bytes, "str | None"], Awaitable[tuple[int, bytes]]]
"""`handler(said, client)`: the request's body, of a GET its query string, and the client's address; gives HTTP
status and JSON body."""


ADMIN_BODY_BYTES = 65_536
"""More of a body than this is not read; a handler gets one byte more then, and refuses it."""
EventsHandler = Callable[[], "AsyncIterator[bytes] | tuple[int, bytes]"]
"""Server-sent events, as they go over the wire, or HTTP status and JSON body of an error."""


class Launcher(Protocol):
    """What is started in the place of the schedulers."""

    def start(self, server_args: Any, port_args: Any) -> multiprocessing.process.BaseProcess:
        """Start the router with stock's arguments and return its process."""

    def wait_ready(self) -> dict[str, Any]:
        """Block until every engine is warm; returns what stock expects of a scheduler, raises if one failed."""


class RouterInsteadOfSchedulers(Patch):
    """Starts the router, which starts the engines, where stock starts schedulers or its data-parallel controller.

    Stock hands `run_scheduler_process_func` of `launch_server` through to here; ours is a `Launcher`.
    """

    target = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"
    kind = "replace"

    @staticmethod
    def hook(cls: type, server_args: Any, port_args: Any, run_scheduler_process_func: Launcher) -> tuple[Any, Any]:
        from sglang.srt.entrypoints.engine import SchedulerInitResult

        launcher = run_scheduler_process_func
        process = launcher.start(server_args, port_args)
        infos: list[dict[str, Any]] = []
        pids = [process.pid]

        def wait_for_ready() -> None:
            info = launcher.wait_ready()
            pids.extend(info.pop("pids"))
            infos.append(info)

        result = SchedulerInitResult(
            scheduler_infos=infos,
            all_child_pids=pids,
            wait_for_ready=wait_for_ready,
            block_until_scheduler_exits=process.join,
        )
        return result, [process]


class ForkInsteadOfSpawn(Patch):
    """Makes the detokenizer start from the forkserver where the front was forked from one.

    Stock sets multiprocessing to spawn, which would import sglang a second time.
    """

    target = "sglang.srt.entrypoints.engine._set_envs_and_config"
    kind = "after"

    @staticmethod
    def hook(result: None, server_args: Any) -> None:
        if multiprocessing.forkserver._forkserver._forkserver_address is not None:  # type: ignore[attr-defined]
            multiprocessing.set_start_method("forkserver", force=True)


class KeysOfOurs(Patch):
    """Lets the live page and /ready be fetched without a key, as stock does with /health, and answers strange keys.

    A browser cannot send one with the address that is typed in. The page is the same for everyone and has no data; it
    asks for the key and sends it with what it fetches. A probe of Kubernetes has none either. Stock compares keys by
    `secrets.compare_digest`, which raises on letters that are not ASCII; such a key is wrong, not a fault.
    """

    target = "sglang.srt.utils.auth.decide_request_auth"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., Any], **request: Any) -> Any:
        if request["path"].rstrip("/") in ("/adapt", "/ready") and request["method"] in ("GET", "HEAD"):
            from sglang.srt.utils.auth import AuthDecision

            return AuthDecision(allowed=True)
        given = request["authorization_header"]
        if given is not None and not given.isascii():
            request["authorization_header"] = None
        return original(**request)


FRONT_PATCHES: tuple[type[Patch], ...] = (
    RouterInsteadOfSchedulers,
    ForkInsteadOfSpawn,
    KeysOfOurs,
    ReadLoadsOfAllSlots,
    *REQUEST_CHECKS,
    *FRONT_CONTAINMENT,
    *TICKETS,
    *EARLY_ANSWERS,
)


def parse_server_args(argv: list[str]) -> Any:
    """Stock ServerArgs from a stock command line.

    Raises:
        StockSettingsError: stock does not take it.
    """
    from sglang.srt.server_args import prepare_server_args

    with refusals_told("--model-path", named_model(argv)), parser_told():
        return prepare_server_args(argv)


def stock_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser that knows every flag of stock's launch_server (for --help)."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog=prog, description=description)
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        # Stock cannot do without a model, we can.
        if action.dest == "model_path":
            action.required = False
    return parser


def model_heads(server_args: Any) -> tuple[int, int]:
    """(attention heads, KV heads) of the model, from its config."""
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig.from_server_args(server_args)
    return config.num_attention_heads, config.get_total_num_kv_heads()


def context_tokens(server_args: Any) -> int:
    """The longest request that the model is made for, from its config and `--context-length`."""
    from sglang.srt.configs.model_config import ModelConfig

    tokens: int = ModelConfig.from_server_args(server_args).context_len
    return tokens


def tell_longest_prompt(tokens: int) -> None:
    """Let `/server_info` say how many tokens a prompt must have fewer than (`max_req_input_len`), from now on."""
    from sglang.srt.entrypoints import http_server

    state = http_server._global_state
    if state is not None:
        state.scheduler_info["max_req_input_len"] = tokens
        state.tokenizer_manager.max_req_input_len = tokens


def profile_key(server_args: Any, gpu: str) -> ProfileKey:
    """What measured times depend on.

    Args:
        server_args: stock's, of any of the engines.
        gpu: name of the GPUs.
    """
    from importlib.metadata import version
    from pathlib import Path

    from sglang.srt.configs.model_config import ModelConfig

    path = server_args.model_path
    return ProfileKey(
        # A folder is another one on every machine.
        model=Path(path).resolve().name if Path(path).is_dir() else path,
        dtype=str(ModelConfig.from_server_args(server_args).dtype).removeprefix("torch."),
        gpu=gpu,
        sglang=version("sglang"),
        torch=version("torch"),
        backend=str(server_args.attention_backend),
    )


def sharing_fault(server_args: Any, tp_sizes: tuple[int, ...]) -> str | None:
    """Why engines of all these TP sizes cannot share one copy of the weights and what to do, or None."""
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_adapt.upstream.weights.refusals import UnshareableError, check_shareable

    try:
        check_shareable(server_args, ModelConfig.from_server_args(server_args), tp_sizes)
    except UnshareableError as error:
        return str(error)
    return None


def sequence_fault(server_args: Any, tp_sizes: tuple[int, ...]) -> str | None:
    """Why engines of these TP sizes cannot run batches sequence-parallel and what to do, or None."""
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_adapt.upstream.sequence.refusals import UnsliceableError, check_sliceable

    try:
        check_sliceable(server_args, ModelConfig.from_server_args(server_args), tp_sizes)
    except UnsliceableError as error:
        return str(error)
    return None


def pool_shape(server_args: Any) -> KvShape:
    """The shapes of the model's KV, for a pool of several TP sizes.

    Raises:
        UnpoolableError: its KV cannot lie in such a pool; says why and what to do.
    """
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_adapt.upstream.kv_shape import kv_shape

    return kv_shape(server_args, ModelConfig.from_server_args(server_args))


def asked_page_size(argv: list[str]) -> int | None:
    """What a stock command line says of `--page-size`, itself or in its config file; stock fills in a default."""
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    if "--config" in argv:
        argv = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    page_size: int | None = parser.parse_args(argv).page_size
    return page_size


def gpu_count() -> int:
    """CUDA devices that this process may use; asks NVML, so that CUDA is not initialised."""
    import torch

    return torch.cuda.device_count()


def run_detokenizer(server_args: Any, port_args: Any) -> None:
    """Stock's detokenizer process, which ends with an exit code other than 0 when its loop ends."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    die_with_parent(signal.SIGKILL)
    ignore_stop_signals()
    prepare_process()
    run_detokenizer_process(server_args, port_args)
    # It serves for ever; stock logs what ended it and tells its parent, which here is the forkserver.
    sys.exit(1)


def serve(
    server_args: Any,
    launcher: Launcher,
    middleware: type,
    middleware_args: dict[str, Any],
    warm_up: Callable[[Any], None],
    admin_routes: Mapping[tuple[str, str], AdminHandler],
    event_routes: Mapping[str, EventsHandler],
    answerer: Answerer | None = None,
) -> None:
    """Run stock's HTTP server in this process until it is told to stop.

    Args:
        server_args: stock ServerArgs for the front.
        launcher: starts the router.
        middleware: ASGI middleware class around the stock app, made with `middleware_args`.
        warm_up: called with server_args in a thread when the HTTP server listens; the server counts as up
            once it has returned, and is stopped if it raises.
        admin_routes: further routes by method and path, behind stock's admin key.
        event_routes: routes of server-sent events by path, behind the same key.
        answerer: is shown each POST before anything else, and may answer it.

    Raises:
        StockSettingsError: there is no such tokenizer or chat template, or it cannot be used.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.engine import init_tokenizer_manager

    tokenizer = server_args.tokenizer_path
    flag = "--model-path" if tokenizer == server_args.model_path else "--tokenizer-path"

    def start_tokenizer(*args: Any) -> Any:
        with refusals_told(flag, tokenizer):
            return init_tokenizer_manager(*args)

    if answerer is not None:
        use_early_answers(answerer)
    http_server.app.add_exception_handler(*named_body_faults(http_server.app))
    http_server.app.add_middleware(middleware, **middleware_args)
    for path in dict.fromkeys(path for _, path in admin_routes):
        handlers = {method: handler for (method, at), handler in admin_routes.items() if at == path}
        _add_admin_route(http_server.app, path, handlers)
    for path, events in event_routes.items():
        _add_event_route(http_server.app, path, events)

    def execute_warmup(args: Any) -> bool:
        try:
            warm_up(args)
        except Exception:
            logger.exception("the warm-up request failed, so the server stops")
            os.kill(os.getpid(), signal.SIGTERM)
            return False
        http_server._global_state.tokenizer_manager.server_status = http_server.ServerStatus.Up
        return True

    http_server.launch_server(
        server_args,
        init_tokenizer_manager_func=start_tokenizer,
        run_scheduler_process_func=launcher,
        run_detokenizer_process_func=run_detokenizer,
        execute_warmup_func=execute_warmup,
    )


def named_body_faults(app: Any) -> tuple[type[Exception], Any]:
    """A handler of bodies that do not pass, for `app.add_exception_handler`: it names the field, and what it may be.

    Stock's puts the whole list of errors into the text, with files and lines of its own. Anthropic's route keeps it.
    """
    from fastapi.exceptions import RequestValidationError
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    stocks = app.exception_handlers[RequestValidationError]

    async def handler(request: Request, error: RequestValidationError) -> Any:
        if request.url.path.startswith("/v1/messages"):
            return await stocks(request, error)
        param, message = body_fault(error.errors())
        said = {"object": "error", "message": message, "type": "invalid_request", "param": param, "code": 400}
        return JSONResponse(said, 400)

    return RequestValidationError, handler


def _add_admin_route(app: Any, path: str, handlers: Mapping[str, AdminHandler]) -> None:
    """A route, by method, protected as stock's administrative ones (sglang/srt/utils/auth.py, ADMIN_OPTIONAL).

    One route for all methods, so that a 405 names them all.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.requests import Request
    from starlette.responses import Response

    async def endpoint(request: Request) -> Response:
        client = None if request.client is None else request.client.host
        method = "GET" if request.method == "HEAD" else request.method
        said = await _body(request) if method == "POST" else request.url.query.encode()
        status, body = await handlers[method](said, client)
        return Response(body, status, media_type="application/json")

    app.router.add_route(path, auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint), methods=list(handlers))


async def _body(request: Any) -> bytes:
    """As much of a request's body as a handler looks at."""
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > ADMIN_BODY_BYTES:
            break
    return bytes(read[: ADMIN_BODY_BYTES + 1])


def _add_event_route(app: Any, path: str, handler: EventsHandler) -> None:
    """A route of server-sent events, protected as those of `_add_admin_route`."""
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

    async def endpoint(request: Request) -> Response:
        if request.method == "HEAD":
            # A stream of nothing would go on for ever.
            return Response(b"", headers={"cache-control": "no-store"}, media_type="text/event-stream")
        events = handler()
        if isinstance(events, tuple):
            status, body = events
            return Response(body, status, {"retry-after": "5"}, media_type="application/json")
        # nginx would hold events back until it has a page of them.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(events, headers=headers, media_type="text/event-stream")

    app.router.add_route(path, auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint), methods=["GET"])


def start_receiving() -> None:
    """Start the tokenizer manager's receive loop now; stock does at the first request, and takes SIGTERM then."""
    from sglang.srt.entrypoints import http_server

    http_server._global_state.tokenizer_manager.auto_create_handle_loop()
