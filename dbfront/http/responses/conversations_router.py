"""The endpoints of OpenAI's Conversations: /v1/conversations, with a list of them besides."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from tierkv.dbfront.http.responses.response_body import items_of
from tierkv.dbfront.http.responses.responses_router import Limit, Order, page_json
from tierkv.dbfront.http.schema import Metadata
from tierkv.dbfront.http.services import FieldError, Services, caller_of, read_body
from tierkv.dbfront.sessions.conversations import Conversations, unknown
from tierkv.dbfront.sessions.session_store import ChatSession, ItemPage, SessionItem, SessionQuery
from tierkv.kvcore import limits
from tierkv.kvcore.errors import UnknownSessionError, UserError

_LABEL: Final = "metadata["
FewItems = Annotated[list[Any], Field(max_length=limits.MAX_ITEMS_ADDED)]
Ttl = Annotated[float, Field(ge=0, le=limits.MAX_SESSION_TTL_S, allow_inf_nan=False)]


class ConversationBody(BaseModel):
    """POST /v1/conversations."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"metadata": {"topic": "kettles"}}]})

    metadata: Metadata | None = Field(
        default=None, description="up to 16 names of 64 characters with values of 512"
    )
    items: FewItems | None = Field(default=None, description="up to 20 first items")
    ttl_s: Ttl | None = Field(
        default=None,
        description="seconds after the last turn when the conversation expires; 0: never; default: "
        "front.session_days",
    )


class ConversationChange(BaseModel):
    """POST /v1/conversations/{conversation_id}."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"metadata": {"topic": "pots"}}]})

    metadata: Metadata | None = Field(default=None, description="replaces the metadata")
    ttl_s: Ttl | None = Field(default=None, description="as for POST /v1/conversations")


class ItemsBody(BaseModel):
    """POST /v1/conversations/{conversation_id}/items."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"items": [{"role": "user", "content": "I like tea."}]}]}
    )

    items: Annotated[FewItems, Field(min_length=1)] = Field(description="up to 20 items to append")


def conversations_router(services: Services, conversations: Conversations) -> APIRouter:
    """Create the endpoints."""
    router = APIRouter()
    _lists(router, conversations)
    _items(router, conversations)
    return router


def _lists(router: APIRouter, conversations: Conversations) -> None:
    store = conversations.store

    @router.post("/v1/conversations", summary="Begin a conversation")
    async def create(request: Request) -> dict[str, Any]:
        body = await read_body(request, ConversationBody)
        items = items_of("items", body.items) if body.items else []
        made = await conversations.create(
            caller_of(request).tenant, metadata=body.metadata, items=items, ttl_s=body.ttl_s
        )
        return conversation_json(made)

    @router.get("/v1/conversations", summary="Conversations, the last used first")
    async def find(request: Request, limit: Limit = 20, after: str = "") -> dict[str, Any]:
        if after:
            try:
                await _conversation(conversations, request, after)
            except UnknownSessionError as error:
                raise FieldError("after", error) from None
        query = SessionQuery(
            caller_of(request).tenant, _labels(request), after, limit + 1, lists_only=True
        )
        found = await conversations.run(store.sessions, query, conversations.clock.wall())
        data = [conversation_json(session) for session in found[:limit]]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else "",
            "last_id": data[-1]["id"] if data else "",
            "has_more": len(found) > limit,
        }

    @router.get("/v1/conversations/{conversation_id}", summary="A conversation")
    async def retrieve(request: Request, conversation_id: str) -> dict[str, Any]:
        return conversation_json(await _conversation(conversations, request, conversation_id))

    @router.post("/v1/conversations/{conversation_id}", summary="Change a conversation's metadata")
    async def change(request: Request, conversation_id: str) -> dict[str, Any]:
        body = await read_body(request, ConversationChange)
        known = await _conversation(conversations, request, conversation_id)
        changed = await conversations.run(
            store.change,
            known.tenant,
            conversation_id,
            conversations.clock.wall(),
            metadata=body.metadata,
            ttl_s=body.ttl_s,
        )
        if changed is None:
            raise unknown("Conversation", conversation_id)
        return conversation_json(changed)

    @router.delete("/v1/conversations/{conversation_id}", summary="Delete a conversation")
    async def delete(request: Request, conversation_id: str) -> dict[str, Any]:
        known = await _conversation(conversations, request, conversation_id)
        if not await conversations.run(store.delete, known.tenant, conversation_id):
            raise unknown("Conversation", conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


def _items(router: APIRouter, conversations: Conversations) -> None:
    store = conversations.store
    path = "/v1/conversations/{conversation_id}/items"

    @router.post(path, summary="Append items to a conversation")
    async def add(request: Request, conversation_id: str) -> dict[str, Any]:
        body = await read_body(request, ItemsBody)
        items = items_of("items", body.items)
        known = await _conversation(conversations, request, conversation_id)
        async with conversations.turn_of(known.tenant, conversation_id):
            now_s = conversations.clock.wall()
            done = await conversations.run(
                store.add_items, known.tenant, conversation_id, items, now_s
            )
        if not done:
            raise unknown("Conversation", conversation_id)
        return page_json(items, len(items))

    @router.get(path, summary="Items of a conversation")
    async def find(
        request: Request,
        conversation_id: str,
        limit: Limit = 20,
        order: Order = "desc",
        after: str = "",
    ) -> dict[str, Any]:
        known = await _conversation(conversations, request, conversation_id)
        if after:
            try:
                await _item(conversations, known, after)
            except UnknownSessionError as error:
                raise FieldError("after", error) from None
        page = ItemPage(limit + 1, after, newest_first=order == "desc")
        found = await conversations.run(store.items, known.tenant, conversation_id, page)
        return page_json(found, limit)

    @router.get(f"{path}/{{item_id}}", summary="An item of a conversation")
    async def retrieve(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
        known = await _conversation(conversations, request, conversation_id)
        return (await _item(conversations, known, item_id)).to_wire()

    @router.delete(f"{path}/{{item_id}}", summary="Remove an item from a conversation")
    async def delete(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
        known = await _conversation(conversations, request, conversation_id)
        async with conversations.turn_of(known.tenant, conversation_id):
            done = await conversations.run(
                store.delete_item, known.tenant, conversation_id, item_id
            )
        if not done:
            raise unknown("Item", item_id)
        return conversation_json(await _conversation(conversations, request, conversation_id))


def conversation_json(session: ChatSession) -> dict[str, Any]:
    """Return a conversation in OpenAI's form, with further fields of TierKV."""
    expires_s = session.expires_s
    return {
        "id": session.session_id,
        "object": "conversation",
        "created_at": int(session.created_s),
        "metadata": dict(session.metadata),
        "model": session.model or None,
        "turns": session.turns,
        "items": session.items,
        "last_active_at": int(session.seen_s),
        "expires_at": None if expires_s is None else int(expires_s),
    }


async def _conversation(
    conversations: Conversations, request: Request, conversation_id: str
) -> ChatSession:
    """Return a conversation of the client's tenant.

    Raises:
        UnknownSessionError: the tenant has none of this id.
    """
    found = await conversations.session(caller_of(request).tenant, conversation_id)
    if not found.is_list:
        raise unknown("Conversation", conversation_id)
    return found


async def _item(conversations: Conversations, session: ChatSession, item_id: str) -> SessionItem:
    page = ItemPage(only=item_id)
    found = await conversations.run(
        conversations.store.items, session.tenant, session.session_id, page
    )
    if not found:
        raise unknown("Item", item_id)
    return found[0]


def _labels(request: Request) -> dict[str, str]:
    """Return the names and values of ``metadata[name]=value`` in the query."""
    found = {
        key[len(_LABEL) : -1]: value
        for key, value in request.query_params.items()
        if key.startswith(_LABEL) and key.endswith("]")
    }
    if len(found) > limits.MAX_METADATA_PAIRS:
        message = f"{len(found)} names, at most {limits.MAX_METADATA_PAIRS} are allowed"
        raise FieldError("metadata", UserError(message))
    return found
