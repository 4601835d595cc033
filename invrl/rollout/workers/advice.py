"""Advice on exceptions that a rollout function raises because it and its client
disagree on who waits: sentences for a failure's detail. Pure."""

from collections.abc import Iterable

from invrl.user_code.frame import describe_exception

_ADVICE = {
    "asyncio.run() cannot be called from a running event loop": (
        "asyncio.run() does not work inside an async function: await the coroutine, or write the function "
        "with def (it then has a thread of its own)"
    ),
    "This event loop is already running": (
        "an async function runs in the worker's event loop and cannot start another: await the coroutine, or "
        "write the function with def (it then has a thread of its own)"
    ),
    "Cannot run the event loop while another loop is running": (
        "an async function runs in the worker's event loop and cannot start another: await the coroutine, or "
        "write the function with def (it then has a thread of its own)"
    ),
    "can't be used in 'await' expression": (
        "what is awaited is no coroutine: the client may be a synchronous one. Use an asynchronous one "
        "(endpoint.openai(), AsyncOpenAI), or write the function with def and leave await out"
    ),
    "'coroutine' object": (
        "an await is missing: endpoint.openai() is an asynchronous client. Write the function with async "
        "def, and await the call"
    ),
}
"""Advice by a text of the exception's message."""


def advice_on(errors: Iterable[BaseException]) -> str:
    """Return a sentence about the first of these exceptions that has one; "" if none
    has."""
    for error in errors:
        if not isinstance(error, RuntimeError | TypeError | AttributeError):
            continue
        message = describe_exception(error)
        for text, advice in _ADVICE.items():
            if text in message:
                return advice
    return ""
