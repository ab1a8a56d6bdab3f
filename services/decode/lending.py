"""The holder contract of a decode instance: what it does for debtors, once its memory is there."""

from __future__ import annotations

from typing import Any

import grpc.aio

from kvcommons.errors import Loading
from kvcommons.holder.server import HolderService
from kvcommons.pb import holder_pb2 as pb
from kvcommons.pb import holder_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class LendingService(holder_pb2_grpc.HolderServicer):
    """Answers Loading until the model is loaded: the block memory is made for it."""

    def __init__(self) -> None:
        self._service: HolderService | None = None

    def open(self, service: HolderService) -> None:
        self._service = service

    async def Reserve(self, request: pb.ReserveRequest, context: _Context) -> pb.ReserveReply:
        return await self._holder().Reserve(request, context)

    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseReply:
        return await self._holder().Release(request, context)

    async def Renew(self, request: pb.RenewRequest, context: _Context) -> pb.RenewReply:
        return await self._holder().Renew(request, context)

    async def Load(self, request: pb.LoadRequest, context: _Context) -> pb.LoadReply:
        return await self._holder().Load(request, context)

    async def Save(self, request: pb.SaveRequest, context: _Context) -> pb.SaveReply:
        return await self._holder().Save(request, context)

    async def Inspect(self, request: pb.InspectRequest, context: _Context) -> pb.InspectReply:
        return await self._holder().Inspect(request, context)

    async def Freeze(self, request: pb.FreezeRequest, context: _Context) -> pb.FreezeReply:
        return await self._holder().Freeze(request, context)

    async def Thaw(self, request: pb.ThawRequest, context: _Context) -> pb.ThawReply:
        return await self._holder().Thaw(request, context)

    async def Trim(self, request: pb.TrimRequest, context: _Context) -> pb.TrimReply:
        return await self._holder().Trim(request, context)

    async def CopyIn(self, request: pb.CopyInRequest, context: _Context) -> pb.CopyInReply:
        return await self._holder().CopyIn(request, context)

    async def Adopt(self, request: pb.AdoptRequest, context: _Context) -> pb.AdoptReply:
        return await self._holder().Adopt(request, context)

    def _holder(self) -> HolderService:
        if self._service is None:
            raise Loading("this decode instance is still loading its model", retry_after_ms=500)
        return self._service
