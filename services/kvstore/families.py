"""The column families of the sessions' database. docs/formats/session-record.md has their bytes."""

RECORDS = "records"  # whole records
HEADS = "heads"  # the same without tokens, messages and block ids
LEASES = "leases"
DOCUMENTS = "documents"  # what turns under way are going to add, of those that take long
META = "meta"
STAMPS = "stamps"  # of former versions, where there were several kvstores: which change came last
