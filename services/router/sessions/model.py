"""The model that a session goes on with: the one that it was held with, for its tokens are of that model."""

from __future__ import annotations

from kvcommons.errors import InvalidInput, ModelNotFound
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.fleet.fleet import Fleet


def model_of_session(fleet: Fleet, record: pb.SessionRecord) -> ModelInfo:
    """The default one for a session that has had no turn. Raises ModelNotFound, which says that it is the
    session's: no client need have named it."""
    try:
        return fleet.model(record.model_name or None)
    except ModelNotFound:
        served = ", ".join(sorted(model.name for model in fleet.models()))
        raise ModelNotFound(
            f"the session was made with the model {record.model_name[:200]!r}, which is not served here; "
            f"served: {served}. Begin another session, or serve the model by that name again (model_name)",
            param="session_id",
        ) from None


def checked_model(
    fleet: Fleet, record: pb.SessionRecord, model: ModelInfo, *, asked: str | None
) -> ModelInfo:
    """The model that a session's turn goes on with; `model` is the request's, which `asked` for it by name or
    for none. Raises InvalidInput, ModelNotFound."""
    if not record.model_name or record.model_name == model.name:
        return model
    held = model_of_session(fleet, record)
    if asked is not None:
        raise InvalidInput(
            f"the session was held with the model {held.name!r}: its tokens are of no use to {model.name!r}; "
            f"leave model out, or begin another session",
            param="model",
        )
    return held
