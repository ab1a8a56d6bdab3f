"""Slab files: the payloads on disk. docs/formats/slab-file.md is the page of their bytes.

A slab file is one region of the disk tier: a header page, then slots of one model. It is created sparse at
its full length, so the file system gives it room as slots are written. Every method blocks; calls on
different slots may run at once on several threads.
"""

from __future__ import annotations

import logging
import mmap
import struct
from collections.abc import Sequence

import xxhash

from kvcommons.errors import DataLoss
from services.kvstore.disk import Disk, DiskFile
from services.kvstore.folder import UnknownFormat
from services.kvstore.tier import PAGE_BYTES, BlockShape, Slot

log = logging.getLogger(__name__)

FORMAT = 1
MAGIC = b"kvcslab\0"
# magic, format, number, fingerprint length, fingerprint, layers, object bytes, slot bytes, slots; then the
# checksum
_HEADER = struct.Struct("<8sIII64sIQQQ")
_CHECKSUM = struct.Struct("<Q")
_FINGERPRINT_BYTES_MAX = 64


def encode_header(number: int, shape: BlockShape, slots: int) -> bytes:
    """The header page of a slab file."""
    fields = _HEADER.pack(
        MAGIC,
        FORMAT,
        number,
        len(shape.model),
        shape.model,
        shape.layers,
        shape.object_bytes,
        shape.slot_bytes,
        slots,
    )
    page = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    return page.ljust(PAGE_BYTES, b"\0")


def decode_header(page: bytes) -> tuple[int, BlockShape, int]:
    """Number, shape and slots of a slab file.

    Raises UnknownFormat for one that another version wrote, DataLoss for a page that is no intact header.
    """
    if len(page) < _HEADER.size + _CHECKSUM.size or page[: len(MAGIC)] != MAGIC:
        raise DataLoss("not a slab file: its first bytes are not the slab magic")
    _, version, number, length, model, layers, object_bytes, slot_bytes, slots = _HEADER.unpack_from(page)
    if version != FORMAT:
        raise UnknownFormat(f"slab file of format {version}; this version of kvcommons reads {FORMAT}")
    (stored,) = _CHECKSUM.unpack_from(page, _HEADER.size)
    shape = BlockShape(model=model[:length], layers=layers, object_bytes=object_bytes)
    if stored != xxhash.xxh3_64_intdigest(page[: _HEADER.size]) or shape.slot_bytes != slot_bytes:
        raise DataLoss("the header of a slab file fails its checksum")
    return number, shape, slots


class SlabFiles:
    """The slab files of one disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open: dict[int, tuple[DiskFile, BlockShape]] = {}
        self._punches = True

    def free_bytes(self) -> int:
        """What the disk still has room for."""
        return self._disk.free_bytes()

    def discover(self) -> list[tuple[int, BlockShape, int]]:
        """Opens what is there: (number, shape, slots) of each.

        A file whose header is damaged is deleted: nothing in it can be trusted, and what it held can be
        computed. Raises UnknownFormat.
        """
        found = []
        for name in self._disk.names():
            if not name.startswith("slab-"):
                continue
            try:
                head, size = self._disk.head(name, PAGE_BYTES)
                number, shape, slots = decode_header(head)
                if name != _name(number) or size < PAGE_BYTES + slots * shape.slot_bytes:
                    raise DataLoss("its name or length does not agree with its header")
                self._open[number] = (self._disk.open(name), shape)
            except UnknownFormat:
                raise
            except (DataLoss, OSError) as error:
                log.error("slab file %s is dropped, its blocks will be computed again: %s", name, error)
                self._disk.remove(name)
                continue
            found.append((number, shape, slots))
        return found

    def create(self, number: int, shape: BlockShape, slots: int) -> None:
        """Makes a slab file, durable with its name. Raises OSError; nothing stays behind then."""
        if len(shape.model) > _FINGERPRINT_BYTES_MAX:
            raise ValueError(f"a model fingerprint has at most {_FINGERPRINT_BYTES_MAX} bytes")
        size = PAGE_BYTES + slots * shape.slot_bytes
        file = self._disk.create(_name(number), encode_header(number, shape, slots), size)
        self._open[number] = (file, shape)

    def remove(self, number: int) -> None:
        """Deletes a slab file; nothing reads or writes it any more."""
        file, _ = self._open.pop(number)
        file.close()
        self._disk.remove(_name(number))

    def read(self, slot: Slot, offset: int, into: Sequence[memoryview]) -> None:
        """Fills page-aligned buffers from `offset` in the slot on, over into following slots if need be.

        Raises OSError; a file that ends early is EIO.
        """
        file, shape = self._open[slot.region]
        file.read(PAGE_BYTES + slot.place * shape.slot_bytes + offset, into)

    def write(self, slot: Slot, payload: Sequence[memoryview]) -> None:
        """Writes whole slots, this one and those that follow it. Raises OSError. Durable after `sync`."""
        file, shape = self._open[slot.region]
        file.write(PAGE_BYTES + slot.place * shape.slot_bytes, payload)

    def sync(self, number: int) -> None:
        """fdatasync of one file."""
        self._open[number][0].sync()

    def answers(self, slot: Slot) -> bool:
        """Whether a slot that the disk failed in takes zeros again, and gives them back."""
        file, shape = self._open[slot.region]
        at, size = PAGE_BYTES + slot.place * shape.slot_bytes, shape.slot_bytes
        with mmap.mmap(-1, size) as zeros, mmap.mmap(-1, size) as read:
            read[:] = b"\xff" * size
            with memoryview(zeros) as source, memoryview(read) as into:
                try:
                    file.write(at, [source])
                    file.sync()
                    file.read(at, [into])
                except OSError:
                    return False
                return into == source

    def punch(self, slot: Slot) -> bool:
        """Gives the room behind a free slot back to the file system; False where it does not take it.

        Raises OSError.
        """
        file, shape = self._open[slot.region]
        if self._punches and not file.punch(PAGE_BYTES + slot.place * shape.slot_bytes, shape.slot_bytes):
            self._punches = False
            log.warning(
                "the file system of the slab files cannot punch holes: room of deleted blocks is used again, "
                "but goes back to the system only when a whole slab file is empty"
            )
        return self._punches

    def close(self) -> None:
        for file, _ in self._open.values():
            file.close()
        self._open.clear()


def _name(number: int) -> str:
    return f"slab-{number:08d}"
