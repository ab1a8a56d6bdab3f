"""A creditor as its debtor sees it: one holder, or several that divide the KV heads between them. The engine
and what moves KV ask for no more than both can do; RemoteHolder says what each method does and raises."""

from __future__ import annotations

from typing import TypeAlias

from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.head_group import HeadGroup

Creditor: TypeAlias = RemoteHolder | HeadGroup
