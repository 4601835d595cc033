"""Routes that agents call, `/v1/...` and `/s/<key>/v1/...`: those that sample in each
dialect, and lookups of models and recorded responses."""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from invrl.errors import SessionError
from invrl.gateway.dialects.chat import ChatDialect
from invrl.gateway.dialects.completions import CompletionsDialect
from invrl.gateway.dialects.dialect import CountingDialect, Dialect
from invrl.gateway.dialects.google.generate_content import (
    CountTokensDialect,
    GenerateContentDialect,
)
from invrl.gateway.dialects.messages import MessagesDialect
from invrl.gateway.dialects.responses import ResponsesDialect
from invrl.gateway.keys import request_keys
from invrl.gateway.registry import SessionRegistry
from invrl.gateway.server.routes.agent_api import (
    AgentEndpoint,
    CountEndpoint,
    EventsEndpoint,
)
from invrl.gateway.server.settings import GatewaySettings
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.turns.turns import Turns
from invrl.host.output.traces import Traces

_PREFIXES = ("/v1", "/s/{key}/v1")
_GOOGLE_PATH = re.compile(
    r"/v1(alpha|beta)/|:(generateContent|streamGenerateContent|countTokens)$"
)
_GOOGLE_PREFIXES = ("/v1beta", "/s/{key}/v1beta", "/v1alpha", "/s/{key}/v1alpha")


class AgentRoutes:
    """Dialects of the served model, and their routes."""

    def __init__(
        self,
        registry: SessionRegistry,
        turns: Turns,
        settings: GatewaySettings,
        traces: Traces | None = None,
    ) -> None:
        self._traces = traces
        self._registry = registry
        self._turns = turns
        self._settings = settings
        openai_model: dict[str, Any] = {
            "model": settings.model_name,
            "vocab_size": settings.vocab_size,
            "token_text": turns.renderer.token_text,
        }
        self._chat = ChatDialect(**openai_model)
        self._completions = CompletionsDialect(**openai_model)
        self._responses = ResponsesDialect(**openai_model)
        self._messages = MessagesDialect(model=settings.model_name)
        self._google = GenerateContentDialect(model=settings.model_name)

    def dialect_for(
        self, request: Request
    ) -> ChatDialect | MessagesDialect | GenerateContentDialect:
        """Return the dialect of this request's client, on a route that belongs to no
        dialect, and in an error."""
        if "x-goog-api-key" in request.headers or _GOOGLE_PATH.search(request.url.path):
            return self._google
        is_anthropic = (
            "anthropic-version" in request.headers or "/v1/messages" in request.url.path
        )
        if is_anthropic:
            return self._messages
        return self._chat

    def note_refusal(self, request: Request, error: SessionError) -> None:
        """Keep the refusal of a request that carries the key of an open session."""
        parts = request.url.path.split("/")
        key_in_path = None
        if parts[1:2] == ["s"] and len(parts) > 2:
            key_in_path = parts[2]
        with contextlib.suppress(SessionError):
            keys = request_keys(key_in_path, dict(request.headers))
            self._registry.by_key(keys).note_refusal(error)

    def sampling_endpoints(self) -> Mapping[str, ASGIApp]:
        """Return the routes that take a prompt, by their path below `/v1`."""
        model = self._settings.model_name
        dialects: list[Dialect[Any]] = [
            self._chat,
            self._completions,
            self._responses,
            self._messages,
            self._google,
        ]
        counting: dict[str, CountingDialect[Any]] = {
            self._messages.path + "/count_tokens": self._messages,
            "/models:countTokens": CountTokensDialect(model=model),
        }
        endpoints: dict[str, ASGIApp] = {}
        for dialect in dialects:
            endpoints[dialect.path] = AgentEndpoint(
                dialect=dialect,
                registry=self._registry,
                turns=self._turns,
                settings=self._settings,
                traces=self._traces,
            )
        streamed = GenerateContentDialect(model=model, streams=True)
        endpoints[streamed.path] = EventsEndpoint(
            dialect=streamed,
            registry=self._registry,
            turns=self._turns,
            settings=self._settings,
            traces=self._traces,
        )
        for path, dialect in counting.items():
            endpoints[path] = CountEndpoint(
                dialect=dialect,
                registry=self._registry,
                turns=self._turns,
                settings=self._settings,
            )
        return endpoints

    def lookup_routes(self) -> list[Route]:
        """Return the routes that sample nothing, under each prefix."""
        routes: list[Route] = []
        for prefix in (*_PREFIXES, *_GOOGLE_PREFIXES):
            routes.append(Route(prefix + "/models", self._show_models, methods=["GET"]))
            routes.append(
                Route(prefix + "/models/{id:path}", self._show_models, methods=["GET"])
            )
        for prefix in _PREFIXES:
            routes.append(
                Route(prefix + "/responses/{id}", self._show_response, methods=["GET"])
            )
        return routes

    async def _show_models(self, request: Request) -> Response:
        """Show the model under all its names, or under the one in the path."""
        record = self._authorized_session(request)
        dialect = self.dialect_for(request)
        name = request.path_params.get("id", "")
        if not name:
            body = dialect.models(
                self._settings.model_names, self._settings.context_length
            )
        else:
            self._turns.check_model(record, name)
            body = dialect.show_model(name, self._settings.context_length)
        return Response(body, media_type="application/json")

    async def _show_response(self, request: Request) -> Response:
        conversation = self._turns.conversation(self._authorized_session(request))
        body = self._responses.retrieve(
            request.path_params["id"],
            conversation.forest.turn,
            request.query_params.multi_items(),
        )
        return Response(body, media_type="application/json")

    def _authorized_session(self, request: Request) -> SessionRecord:
        """Return the session of a request. Raises SessionError 401 if it carries no key
        of an open session."""
        keys = request_keys(request.path_params.get("key"), dict(request.headers))
        record = self._registry.by_key(keys)
        record.last_heard.update()
        return record
