"""Client of a Quire server over KServe v2 gRPC, blocking and asyncio. Cancelling a request mostly ends it in
the engine too.

The package installs alone: it imports neither `quire` nor torch.
"""

from quire_client.aio import AsyncClient, AsyncStream
from quire_client.client import Client, Stream
from quire_client.errors import (
    Cancelled,
    ConnectError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ProtocolError,
    QuireClientError,
    ServerError,
    Unavailable,
)
from quire_client.types import Choice, Chunk, Embeddings, Message, ModelInfo, Result, Scores, Timing

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Choice",
    "Chunk",
    "Client",
    "ConnectError",
    "DeadlineExceeded",
    "Embeddings",
    "InvalidArgument",
    "Message",
    "ModelInfo",
    "NotFound",
    "PermissionDenied",
    "ProtocolError",
    "QuireClientError",
    "Result",
    "Scores",
    "ServerError",
    "Stream",
    "Timing",
    "Unavailable",
]
__version__ = "0.1.0"
