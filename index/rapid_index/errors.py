"""Errors of a knowledge base.

    Exception
    └── KnowledgeBaseError            the ones below, and: path exists, unknown format, no records, no faiss
        ├── ForeignKnowledgeBase      made by other networks than the ones it is opened with
        └── CorruptKnowledgeBase      files missing, truncated, altered or not fitting together

Wrong arguments (shapes, dtypes, ranges) are ``ValueError`` with the name of the argument; failures of the file system
(permission denied, disk full) stay the ``OSError`` they are.
"""


class KnowledgeBaseError(Exception):
    """A knowledge base cannot be written or read; the message is one line: the path, what is wrong, what to do."""


class ForeignKnowledgeBase(KnowledgeBaseError):
    """The knowledge base was made by other networks: its keys are meaningless to the given ones."""


class CorruptKnowledgeBase(KnowledgeBaseError):
    """Files of the knowledge base are missing, truncated, altered or do not fit together."""
